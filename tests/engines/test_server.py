"""A running vLLM server as the engine: the protocol against a small server of our own, and a real `vllm serve`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from halfmatch.config import EngineSettings, Sampling
from halfmatch.engines import NonFiniteError, Request, create, server
from halfmatch.errors import UserError
from halfmatch.precision import Precision

BF16 = Precision.named("bf16")
SAMPLING = Sampling(max_tokens=8)
REQUESTS = [Request((2, 3, index), 100 + index) for index in range(20)]
LOGITS = {"token_id:4": 2.0, "token_id:5": 1.0, "token_id:6": -1.0}


class FakeVllm:
    """An OpenAI-compatible server in this process; `completion` and the attributes say what it answers."""

    def __init__(self) -> None:
        self.models: dict[str, Any] = {"data": []}
        self.info: tuple[int, dict[str, Any]] = (404, {"detail": "Not Found"})
        self.processed = True
        self.completion: Callable[[dict[str, Any]], tuple[int, Any]] = self.sampled
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                fake.keys.append(self.headers.get("Authorization"))
                answers = {
                    "/v1/models": (200, fake.models),
                    "/version": (200, {"version": "0.32.0"}),
                    "/server_info?config_format=json": fake.info,
                }
                self.answer(*answers[self.path])

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.asked.append(body)
                self.answer(*fake.completion(body))

            def answer(self, status: int, content: Any) -> None:
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def sampled(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Three tokens, the first of which tells the seed; log-probs of the probe from LOGITS."""
        temperature = body["temperature"] if self.processed else 1.0
        choice = {
            "token_ids": [body["seed"], 5, 1],
            "logprobs": {
                "token_logprobs": [-0.25, -0.5, -1.0],
                "top_logprobs": [{token: logit / temperature - 3.0 for token, logit in LOGITS.items()}],
            },
            "finish_reason": "stop",
        }
        return 200, {"choices": [choice]}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tiny_model_folder: Path) -> Iterator[FakeVllm]:
    monkeypatch.setattr(server, "PAUSE_S", 0.0)
    fake = FakeVllm()
    fake.models = {"data": [{"id": "served", "root": str(tiny_model_folder), "max_model_len": 512}]}
    yield fake
    fake.http.shutdown()
    fake.http.server_close()


def connect(fake: FakeVllm, folder: Path, precision: Precision = BF16) -> server.ServerEngine:
    engine = create("vllm", folder, precision, EngineSettings(name="vllm", slots=8, server=fake.url))
    assert isinstance(engine, server.ServerEngine)
    return engine


def test_completions_come_in_the_order_of_the_requests(fake: FakeVllm, tiny_model_folder: Path) -> None:
    finished: list[int] = []
    completions = connect(fake, tiny_model_folder).generate(
        REQUESTS, SAMPLING, stop_token_ids=[1], progress=finished.append
    )
    assert [completion.token_ids for completion in completions] == [[request.seed, 5, 1] for request in REQUESTS]
    assert {tuple(completion.logprobs) for completion in completions} == {(-0.25, -0.5, -1.0)}
    assert sum(finished) == len(REQUESTS)


def test_what_is_asked_for(fake: FakeVllm, tiny_model_folder: Path) -> None:
    connect(fake, tiny_model_folder).generate(
        REQUESTS[:1], Sampling(temperature=0.6, top_p=0.95, max_tokens=8), stop_token_ids=[1, 7]
    )
    body = fake.asked[-1]
    assert body["model"] == "served"
    assert body["prompt"] == [2, 3, 0]
    assert (body["seed"], body["temperature"], body["top_p"], body["max_tokens"]) == (100, 0.6, 0.95, 8)
    assert (body["ignore_eos"], body["stop_token_ids"], body["return_token_ids"]) == (True, [1, 7], True)
    assert (body["top_k"], body["min_p"], body["repetition_penalty"]) == (0, 0.0, 1.0)


def test_logprobs_before_the_temperature_are_refused(fake: FakeVllm, tiny_model_folder: Path) -> None:
    fake.processed = False
    with pytest.raises(UserError, match="--logprobs-mode processed_logprobs"):
        connect(fake, tiny_model_folder)


def test_another_model_is_refused(fake: FakeVllm, tiny_model_folder: Path) -> None:
    fake.models = {"data": [{"id": "other/model", "root": "other/model", "max_model_len": 512}]}
    with pytest.raises(UserError, match=r"serves 'other/model'.*vllm serve"):
        connect(fake, tiny_model_folder)


def test_a_model_on_another_machine_goes_by_the_folder_s_name(fake: FakeVllm, tiny_model_folder: Path) -> None:
    fake.models = {"data": [{"id": tiny_model_folder.name, "root": "/elsewhere", "max_model_len": 512}]}
    assert connect(fake, tiny_model_folder).description["dtype_confirmed"] is False


@pytest.mark.parametrize(("held", "accepted"), [("torch.bfloat16", True), ("bfloat16", True), ("torch.float16", False)])
def test_the_dtype_is_compared_where_the_server_tells_it(
    fake: FakeVllm, tiny_model_folder: Path, held: str, accepted: bool
) -> None:
    fake.info = (200, {"vllm_config": {"model_config": {"dtype": held}}})
    if accepted:
        assert connect(fake, tiny_model_folder).description["dtype_confirmed"] is True
    else:
        with pytest.raises(UserError, match="--dtype bfloat16"):
            connect(fake, tiny_model_folder)


def test_fp32_modules_are_refused(fake: FakeVllm, tiny_model_folder: Path) -> None:
    with pytest.raises(UserError, match="fp32_modules"):
        connect(fake, tiny_model_folder, Precision.named("bf16", fp32_modules=("lm_head",)))


def test_training_is_refused(fake: FakeVllm, tiny_model_folder: Path) -> None:
    with pytest.raises(UserError, match="to train"):
        connect(fake, tiny_model_folder).load_weights([])


def test_what_does_not_fit_the_context_is_refused(fake: FakeVllm, tiny_model_folder: Path) -> None:
    with pytest.raises(UserError, match="--max-model-len of 512"):
        connect(fake, tiny_model_folder).generate(REQUESTS, Sampling(max_tokens=510), stop_token_ids=[])


def test_no_server_is_a_clear_error(fake: FakeVllm, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        fake.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(UserError, match=r"is the server of engine\.server running"):
            connect(fake, tiny_model_folder)


def test_a_busy_server_is_asked_again(fake: FakeVllm, tiny_model_folder: Path) -> None:
    engine = connect(fake, tiny_model_folder)
    busy = iter([503, 429])

    def at_first_busy(body: dict[str, Any]) -> tuple[int, Any]:
        status = next(busy, 200)
        return (status, {}) if status != 200 else fake.sampled(body)

    fake.completion = at_first_busy
    (completion,) = engine.generate(REQUESTS[:1], SAMPLING, stop_token_ids=[])
    assert completion.token_ids == [100, 5, 1]


def test_the_server_s_complaint_is_passed_on(fake: FakeVllm, tiny_model_folder: Path) -> None:
    engine = connect(fake, tiny_model_folder)
    fake.completion = lambda body: (400, {"error": {"message": "the prompt is too long", "code": 400}})
    with pytest.raises(UserError, match="answered 400: the prompt is too long"):
        engine.generate(REQUESTS, SAMPLING, stop_token_ids=[])


def test_the_key_is_sent_and_asked_for(
    fake: FakeVllm, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    engine = connect(fake, tiny_model_folder)
    assert set(fake.keys) == {"Bearer secret"}
    fake.completion = lambda body: (401, {"error": "Unauthorized"})
    with pytest.raises(UserError, match="put the server's key into VLLM_API_KEY"):
        engine.generate(REQUESTS, SAMPLING, stop_token_ids=[])


def test_a_server_of_another_kind_is_a_clear_error(fake: FakeVllm, tiny_model_folder: Path) -> None:
    fake.models = b"<html>"  # type: ignore[assignment]
    with pytest.raises(UserError, match="OpenAI-compatible"):
        connect(fake, tiny_model_folder)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"token_ids": None}, UserError, "no token ids"),
        ({"logprobs": None}, UserError, "no token ids with its log-probs"),
        ({"token_ids": [4, 5]}, RuntimeError, "2 token ids and 3 log-probs"),
        ({"finish_reason": "abort"}, RuntimeError, "'abort'"),
        ({"logprobs": {"token_logprobs": [-0.25, None, -1.0]}}, NonFiniteError, "not finite"),
        ({"logprobs": {"token_logprobs": [-0.25, -9999.0, -1.0]}}, NonFiniteError, "not finite"),
    ],
)
def test_a_broken_record_is_never_taken(
    fake: FakeVllm, tiny_model_folder: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    engine = connect(fake, tiny_model_folder)

    def broken(body: dict[str, Any]) -> tuple[int, Any]:
        status, answer = fake.sampled(body)
        answer["choices"][0] |= changes
        return status, answer

    fake.completion = broken
    with pytest.raises(error, match=message):
        engine.generate(REQUESTS[:1], SAMPLING, stop_token_ids=[])


# ------------------------------------------------------------------------------------------------------ a real server
@pytest.fixture(scope="module")
def served(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a vLLM server of the tiny model in bf16, on the loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_model_folder)]
    options = [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "bfloat16",
        "--enforce-eager",
        "--max-num-seqs",
        "8",
    ]
    memory = ["--kv-cache-memory-bytes", "100000000", "--logprobs-mode", "processed_logprobs"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    with open(log, "w") as output:
        process = subprocess.Popen([*command, *options, *memory], stdout=output, stderr=output, env=environment)
    try:
        for _ in range(240):
            if process.poll() is not None:
                pytest.fail(log.read_text()[-2000:])
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(1)
        else:
            pytest.fail("the server did not come up: " + log.read_text()[-2000:])
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


@pytest.mark.vllm
def test_a_real_server_gives_what_the_engine_in_the_process_gives(served: str, tiny_model_folder: Path) -> None:
    requests = [Request((2, 3, 4 + index % 10), 500 + index) for index in range(16)]
    sampling = Sampling(temperature=0.7, max_tokens=24)
    at_server = create("vllm", tiny_model_folder, BF16, EngineSettings(name="vllm", slots=8, server=served))
    assert at_server.description["dtype_confirmed"] is True
    over_http = at_server.generate(requests, sampling, stop_token_ids=[5, 6])

    here = create("vllm", tiny_model_folder, BF16, EngineSettings(name="vllm", slots=8))
    in_process = here.generate(requests, sampling, stop_token_ids=[5, 6])
    here.close()
    assert over_http == in_process
    assert {completion.finish_reason for completion in over_http} == {"stop", "length"}


@pytest.mark.vllm
def test_a_real_server_in_another_dtype_is_refused(served: str, tiny_model_folder: Path) -> None:
    with pytest.raises(UserError, match="--dtype float16"):
        create("vllm", tiny_model_folder, Precision.named("fp16"), EngineSettings(name="vllm", server=served))
