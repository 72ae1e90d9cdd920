"""Evaluate a model on maths sets.

    python eval/math_eval.py --model_path ./trained_model --dataset gsm8k
    python eval/math_eval.py --model_path ./trained_model --dataset gsm8k,math500,aime24 --n_samples 8 --temperature 0.8
    python eval/math_eval.py --model_path tiny --dataset all --data_dir ./data

The table goes to stdout; every sample with its verdict, a summary as JSON and a report as Markdown go to --output. The same command goes on
with an evaluation that was stopped, and gives what is there when nothing has changed.

Exit status: 0; 2 when the call was wrong or something is missing; 130 when interrupted.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__" and sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    del sys.path[0]  # this folder: its modules have names that others also use

try:
    from rlkit.eval import evaluate
except ImportError as missing:
    sys.exit(f"{missing}. Use the Python that rlkit is installed in, such as .venv/bin/python after make setup.")

from rlkit.errors import ConfigError, RlkitError
from rlkit.parameters import convert

ENGINE_ARGS = "the fields of rlkit.EngineSpec, such as tensor_parallel_size=2 or max_model_len=4096"


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="math_eval.py", description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    model = out.add_argument_group("model")
    model.add_argument("--model_path", "--model", required=True, help="folder, hub id, or a model that rlkit ships (tiny, smollm2)")
    model.add_argument("--engine", choices=("vllm", "hf"), default=None, help="how responses are sampled; default: as the config says")
    model.add_argument("--engine_arg", action="append", default=[], metavar="KEY=VALUE", help=ENGINE_ARGS)
    model.add_argument("--config", default=None, help="cluster config or address; default: a cluster on this machine for this evaluation")
    data = out.add_argument_group("data")
    data.add_argument("--dataset", "--datasets", "--data_names", required=True, help="a set, several with commas, or all")
    data.add_argument("--split", default="test")
    data.add_argument("--data_dir", default=None, help="where NAME/SPLIT.jsonl is looked for first")
    data.add_argument("--limit", "--num_test_sample", type=int, default=None, help="only the first so many problems")
    data.add_argument("--template", "--prompt_type", default="auto", help="auto, chat, plain, qwen-boxed or r1")
    data.add_argument("--shots", "--num_shots", type=int, default=0, help="solved examples from the train split before each problem")
    sampling = out.add_argument_group("sampling")
    sampling.add_argument("--n_samples", "--n", "--n_sampling", type=int, default=1, dest="n", help="samples a problem")
    sampling.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    sampling.add_argument("--top_p", type=float, default=1.0)
    sampling.add_argument("--top_k", type=int, default=0, help="0: off")
    sampling.add_argument("--max_tokens", "--max_tokens_per_call", type=int, default=2048, help="of one response")
    sampling.add_argument("--seed", type=int, default=0)
    grading = out.add_argument_group("grading")
    grading.add_argument("--rules", default=None, help="where the final answer may stand, with commas; default: as the template says")
    grading.add_argument("--rel_tol", type=float, default=None, help="where one side is written as a decimal; default: the grader's")
    grading.add_argument("--timeout_s", type=float, default=None, help="of one symbolic comparison; default: the grader's")
    files = out.add_argument_group("files")
    files.add_argument("--output", "--output_dir", default="runs/eval", help="folder for samples, summaries and reports")
    files.add_argument("--fresh", action="store_true", help="sample anew, whatever is there")
    files.add_argument("-q", "--quiet", action="store_true", help="no progress bar")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a batch system's end also ends the cluster that was started here
    try:
        found = run(args)
    except RlkitError as error:
        print(f"math_eval: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("math_eval: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    print(found)
    for evaluation in found:
        print(f"{evaluation.dataset}: {evaluation.folder}", file=sys.stderr)
    return 0


def run(args: argparse.Namespace) -> Any:
    """The `Evaluations` that the arguments ask for."""
    names = ("n", "temperature", "top_p", "top_k", "max_tokens", "template", "shots", "limit", "seed", "rel_tol", "timeout_s", "engine")
    settings: dict[str, Any] = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.rules is not None:
        settings["rules"] = tuple(args.rules.split(","))
    for pair in args.engine_arg:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--engine_arg {pair!r} is not KEY=VALUE.")
        if key.strip() in settings:
            raise ConfigError(f"--engine_arg {pair!r}: --{key.strip()} is an option of its own.")
        settings[key.strip()] = convert(key.strip(), value, None)
    found = evaluate(
        args.model_path,
        [name for name in args.dataset.split(",") if name.strip()],
        args.split,
        data_dir=args.data_dir,
        output=args.output,
        resume=not args.fresh,
        cluster=args.config,
        progress=not args.quiet,
        **settings,
    )
    return found


if __name__ == "__main__":
    sys.exit(main())
