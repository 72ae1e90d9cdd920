"""The evaluation's sets by name, and fetching them: from a hub that runs in this process, and from none."""

import http.server
import io
import json
import os
import threading
import time
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlkit import cli
from rlkit.errors import DataError
from rlkit.eval import catalog
from rlkit.formats import FORMATS, SETS, of_hub_id
from rlkit.tasks import load_tasks

MAIN, CONVERTED = "main", "refs/convert/parquet"
SHIPPED = ["arithmetic", "arithmetic_easy", "arithmetic_hard", "countdown", "word_problems"]
GSM = [{"question": f"What is {i} + 1?", "answer": f"{i} + 1 = <<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"} for i in range(3)]


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    folder = tmp_path / "home"
    monkeypatch.setenv("RLKIT_HOME", str(folder))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    return folder


def jsonl(*rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(*rows) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), out)
    return out.getvalue()


def put(file: Path, *rows) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(jsonl(*rows))
    return file


@pytest.fixture
def hub(monkeypatch):
    """An empty hub, as a dict from (repository, revision, file) to bytes; the library finds it by HF_ENDPOINT."""
    files: dict[tuple[str, str, str], bytes] = {}
    shas = {MAIN: "a" * 40, CONVERTED: "b" * 40}

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def respond(self, status, body=b"", **headers):
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self):
            path = unquote(self.path.partition("?")[0])
            if path.startswith("/api/datasets/"):
                repo, _, revision = path.removeprefix("/api/datasets/").partition("/revision/")
                names = [name for r, v, name in files if (r, v) == (repo, revision or MAIN)]
                if not names:
                    self.respond(404, X_Error_Code="RevisionNotFound" if any(r == repo for r, _, _ in files) else "RepoNotFound")
                    return
                info = {"id": repo, "sha": shas[revision or MAIN], "siblings": [{"rfilename": n} for n in names]}
                self.respond(200, json.dumps(info).encode(), Content_Type="application/json")
                return
            repo, _, rest = path.removeprefix("/datasets/").partition("/resolve/")
            sha, _, name = rest.partition("/")
            revision = next(k for k, v in shas.items() if v == sha)
            self.respond(200, files[repo, revision, name], ETag=f'"{abs(hash(name)):x}"', X_Repo_Commit=sha)

        do_HEAD = do_GET

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield files
    server.shutdown()
    server.server_close()


# --- names --------------------------------------------------------------------------------------------------------------------------


def test_names_are_the_public_sets_and_the_shipped_ones():
    assert catalog.names() == [*SETS, *SHIPPED]
    assert {
        *("gsm8k", "math", "math500", "aime24", "amc23", "minerva_math", "olympiadbench", "gaokao2023en", "college_math", "svamp"),
        *("asdiv", "mawps", "sat_math", "tabmwp"),
    } == set(SETS)


def test_resolve_takes_lists_and_all(home, tmp_path):
    assert catalog.resolve("math500, gsm8k,,math500,arithmetic") == ["math500", "gsm8k", "arithmetic"]
    assert catalog.resolve("openai/gsm8k:main,mine.jsonl,svamp") == ["openai/gsm8k:main", "mine.jsonl", "svamp"]
    with pytest.raises(DataError, match=r"'all' means the public sets whose split 'test' is here, and none is.*rlkit data get"):
        catalog.resolve("all")
    put(home / "data" / "svamp" / "test.jsonl", {})
    put(tmp_path / "mine" / "aime24" / "test.jsonl", {})
    put(tmp_path / "mine" / "gsm8k" / "train.jsonl", {})
    put(tmp_path / "mine" / "my_own" / "test.jsonl", {})
    assert catalog.resolve("all") == ["svamp"]
    assert catalog.resolve("svamp,all,countdown", data_dir=tmp_path / "mine") == ["svamp", "aime24", "countdown"]
    assert catalog.resolve("all", "train", data_dir=tmp_path / "mine") == ["gsm8k"]
    assert catalog.resolve("my_own", data_dir=tmp_path / "mine") == ["my_own"]
    for text, message in [("gsm8", "no set 'gsm8', did you mean 'gsm8k'"), ("my_own", "no set 'my_own'"), (" , ", "names no set")]:
        with pytest.raises(DataError, match=message):
            catalog.resolve(text)
    with pytest.raises(DataError, match="is no folder"):
        catalog.resolve("all", data_dir=tmp_path / "absent")


def test_list_says_what_is_here(home, tmp_path, capsys):
    put(home / "data" / "gsm8k" / "test.jsonl", *GSM)
    put(tmp_path / "mine" / "mawps" / "test.jsonl", {"input": "I", "target": 1})
    assert cli.main(["data", "list", "--data_dir", str(tmp_path / "mine")]) == 0
    lines = {line.split()[0]: line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()}
    assert lines["gsm8k"] == ["gsm8k", "3", "openai/gsm8k:main", str(home / "data" / "gsm8k" / "test.jsonl")]
    assert lines["mawps"] == ["mawps", "1", "-", str(tmp_path / "mine" / "mawps" / "test.jsonl")]
    assert lines["math"] == ["math", "-", "DigitalLearningGmbH/MATH-lighteval", "not here"]
    assert lines["countdown"] == ["countdown", "256", "-", "shipped"]
    assert len(lines) == 1 + len(SETS) + len(SHIPPED)


# --- what lies on the hub -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "config", "expected"),
    [
        (["README.md", "main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"], "main", [2]),
        (["main/test-00000-of-00001.parquet", "socratic/test-00000-of-00001.parquet"], "main", [0]),
        (["main/test-00000-of-00001.parquet", "socratic/test-00000-of-00001.parquet"], None, []),
        (["data/test-00001-of-00002-abc.parquet", "data/test-00000-of-00002-abc.parquet"], None, [1, 0]),
        (["test.jsonl", "test.csv", "latest.jsonl", "test_small.jsonl"], None, [0]),
        (["data/test.jsonl", "data/test.parquet"], None, [1]),
        (["default/test/0000.parquet", "default/test/0001.parquet", "default/train/0000.parquet"], "default", [0, 1]),
        (["other/OE.parquet", "test.pkl", "test.py"], None, []),
    ],
)
def test_the_files_of_a_split_are_picked(files, config, expected):
    assert catalog.pick(files, config, "test") == [files[i] for i in expected]


def test_the_table_is_whole():
    for name, each in SETS.items():
        assert FORMATS[name] is each.form
        assert each.homepage.startswith("https://")
        if each.hub is not None:
            assert "test" in each.hub.splits, name
            assert of_hub_id(str(each.hub)) is each.form
    assert of_hub_id("someone/gsm8k") is FORMATS["gsm8k"]
    assert of_hub_id("someone/else").question == "question"


# --- fetching -----------------------------------------------------------------------------------------------------------------------


def test_get_writes_what_load_tasks_reads(hub, home, capsys):
    hub["openai/gsm8k", MAIN, "main/test-00000-of-00002.parquet"] = parquet(*GSM[:2])
    hub["openai/gsm8k", MAIN, "main/test-00001-of-00002.parquet"] = parquet(GSM[2])
    hub["HuggingFaceH4/MATH-500", MAIN, "test.jsonl"] = jsonl({"problem": "P", "answer": "½", "solution": "S", "level": 2})
    assert cli.main(["data", "get", "gsm8k", "math500", "gsm8k"]) == 0
    places = [home / "data" / name / "test.jsonl" for name in ("gsm8k", "math500")]
    assert capsys.readouterr().out.splitlines() == [f"{places[0]}: 3 rows", f"{places[1]}: 1 rows"]
    assert [(p.id, p.answer) for p in load_tasks("gsm8k", "test")] == [(f"gsm8k/test/{i}", str(i + 1)) for i in range(3)]
    assert load_tasks("math500", "test")[0].answer == "½"
    assert catalog.resolve("all") == ["gsm8k", "math500"]
    assert [p.name for p in places[0].parent.iterdir()] == ["test.jsonl"]  # nothing half done is left


def test_get_takes_the_hub_s_own_copy_where_main_has_none(hub, tmp_path):
    row = {"question": "Q", "context": None, "final_answer": ["1", "2"], "solution": ["S"], "unit": None}
    hub["Hothan/OlympiadBench", MAIN, "OE/OE.parquet"] = b""
    hub["Hothan/OlympiadBench", CONVERTED, "OE_TO_maths_en_COMP/train/0000.parquet"] = parquet(row)
    hub["Hothan/OlympiadBench", CONVERTED, "OE_TO_physics_en_COMP/train/0000.parquet"] = parquet(row, row)
    got = catalog.fetch("olympiadbench", data_dir=tmp_path / "new")
    assert (got.path, got.rows, got.new) == (tmp_path / "new" / "olympiadbench" / "test.jsonl", 1, True)
    assert load_tasks("olympiadbench", "test", data_dir=tmp_path / "new")[0].answer == "1, 2"


def test_splits_are_joined_and_rows_left_out_as_the_evaluation_does(hub, home):
    def svamp(answer):
        return {"ID": answer, "Body": "B.", "Question": "Q?", "Answer": answer, "Type": "T"}

    hub["ChilleD/SVAMP", MAIN, "data/train-00000-of-00001.parquet"] = parquet(svamp("1"), svamp("2"))
    hub["ChilleD/SVAMP", MAIN, "data/test-00000-of-00001.parquet"] = parquet(svamp("3.0"))
    assert catalog.fetch("svamp").rows == 3
    assert [p.answer for p in load_tasks("svamp", "test")] == ["1", "2", "3.0"]
    asdiv = [{"body": "B.", "question": "Q?", "answer": a} for a in ("9 (apples)", "3 (cats); 4 (dogs)")]
    hub["EleutherAI/asdiv", CONVERTED, "default/validation/0000.parquet"] = parquet(*asdiv)
    hub["EleutherAI/asdiv", MAIN, "README.md"] = b""
    assert catalog.fetch("asdiv").rows == 1
    with pytest.raises(DataError, match=r"'asdiv' cannot be fetched\. No copy of its split 'train'"):
        catalog.fetch("asdiv", "train")


def test_a_file_that_is_there_stays_unless_forced(hub, home, capsys):
    hub["openai/gsm8k", MAIN, "main/test.jsonl"] = jsonl(*GSM)
    file = put(home / "data" / "gsm8k" / "test.jsonl", GSM[0])
    assert cli.main(["data", "get", "gsm8k"]) == 0
    assert capsys.readouterr().out == f"{file}: 1 rows (it was there; --force fetches it anew)\n"
    assert cli.main(["data", "get", "gsm8k", "--force"]) == 0
    assert capsys.readouterr().out == f"{file}: 3 rows\n"
    put(file, {"question": "Q", "answer": "no hashes"})
    with pytest.raises(DataError, match=r"The file that is there cannot be used: .*line 1.*--force"):
        catalog.fetch("gsm8k")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (jsonl(GSM[0], {"question": "Q", "answer": "without hashes"}), "openai/gsm8k:main, row 2: the answer"),
        (jsonl(GSM[0], {"problem": "Q", "answer": "#### 1"}), "row 2: there is no field 'question'"),
        (jsonl(GSM[0]) + b"{", "line 2: not valid JSON"),
        (b"", "gave no rows"),
    ],
)
def test_rows_that_do_not_load_replace_nothing(hub, home, rows, message):
    hub["openai/gsm8k", MAIN, "main/test.jsonl"] = rows
    file = put(home / "data" / "gsm8k" / "test.jsonl", GSM[0])
    before = file.read_bytes()
    with pytest.raises(DataError, match=message):
        catalog.fetch("gsm8k", force=True)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


def test_what_the_hub_lacks_is_said(hub, capsys):
    assert cli.main(["data", "get", "gsm8k"]) == 2
    assert "does not give openai/gsm8k:main: " in capsys.readouterr().err
    hub["openai/gsm8k", MAIN, "main/train.jsonl"] = jsonl(*GSM)
    assert cli.main(["data", "get", "gsm8k"]) == 2
    assert "openai/gsm8k:main on the hub has no .jsonl or .parquet file of its split 'test'" in capsys.readouterr().err


def test_without_a_network_one_line_says_what_to_do(monkeypatch, home, capsys):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    began = time.monotonic()
    assert cli.main(["data", "get", "gsm8k", "math500"]) == 2
    assert time.monotonic() - began < 10
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert not out
    assert line.startswith("rlkit: http://127.0.0.1:9 cannot be reached for openai/gsm8k:main (")
    assert f"made by hand may be put at {home / 'data' / 'gsm8k' / 'test.jsonl'}: one JSON object a line; see https://" in line


def test_a_hub_that_does_not_answer_is_not_waited_for(monkeypatch, hub):
    import huggingface_hub

    monkeypatch.setattr(catalog, "LISTING_TIMEOUT_S", 0.2)
    waiting = threading.Event()
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *args, **kwargs: waiting.wait(20))
    with pytest.raises(DataError, match=r"cannot be reached for openai/gsm8k:main \(no answer within 0 s\)"):
        catalog.fetch("gsm8k")
    waiting.set()


def test_names_that_cannot_be_fetched(hub, capsys, home):
    for name, message in [
        ("gsmk", "no public set 'gsmk', did you mean 'gsm8k'"),
        ("countdown", "'countdown' ships with rlkit"),
        ("mawps", f"hub is known: put its rows at DIR/mawps/test.jsonl and say data_dir=DIR, or at {home / 'data' / 'mawps'}"),
    ]:
        assert cli.main(["data", "get", "gsm8k", name]) == 2  # before anything is fetched
        assert message in capsys.readouterr().err
    put(home / "data" / "mawps" / "test.jsonl", {"input": "I", "target": 1})
    assert cli.main(["data", "get", "mawps"]) == 0
    assert os.listdir(home / "data") == ["mawps"]
