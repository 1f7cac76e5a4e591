"""A running `vllm serve` as the rollout engine, over its OpenAI-compatible endpoint: token ids in, token ids out.

The server is asked, and probed, whether it is what the configuration says: the model, the dtype where it tells, and
log-probs of the distribution that it samples from (`--logprobs-mode processed_logprobs`; by default they are those
before the temperature).
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from halfmatch.engines import Completion, NonFiniteError, Request
from halfmatch.errors import UserError
from halfmatch.precision import torch_dtype

if TYPE_CHECKING:
    import torch

    from halfmatch.config import EngineSettings, Sampling
    from halfmatch.precision import DType, Precision

# A response of many tokens comes as a whole, when its last token is there.
TIMEOUT_S = 3600.0
# A connection that breaks, or a server that is busy, is tried again; the seed makes it the same request.
TRIES = 4
PAUSE_S = 1.0
API_KEY = "VLLM_API_KEY"


class ServerEngine:
    """`engines.Engine` on a server whose URL is `settings.server`; `settings.slots` requests are under way at once."""

    def __init__(self, model: Path, precision: Precision, settings: EngineSettings):
        assert settings.server is not None
        if precision.fp32_modules and precision.rollout != "fp32":
            raise UserError(
                f"fp32_modules {list(precision.fp32_modules)}: a server computes them in its own dtype; leave out "
                "engine.server, or fp32_modules"
            )
        self._client = _Client(settings.server)
        self._slots = settings.slots
        served = _find_model(self._client.get("/v1/models"), Path(model), settings.server)
        self._model: str = served["id"]
        self._context: int = served["max_model_len"]
        self.dtype: DType = precision.rollout
        confirmed = _check_configuration(self._client, precision)
        _check_logprobs(self._complete)
        version = self._client.get("/version").get("version", "unknown")
        self.description: Mapping[str, Any] = {
            "name": "vllm",
            "version": version,
            "mode": "server",
            "dtype": self.dtype,
            # whether the server said so, or only the configuration
            "dtype_confirmed": confirmed,
            "fp32_modules": [],
            "logprobs_mode": "processed_logprobs",
        }

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """A server has the weights that it was started with: it samples and evaluates them, and takes no others."""
        raise UserError(
            "engine.server: a server's weights cannot be replaced; leave engine.server out to train and to validate"
        )

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Sample one completion a request, in the order of the requests; see Engine.generate."""
        for index, request in enumerate(requests):
            if len(request.prompt_ids) + sampling.max_tokens > self._context:
                raise UserError(
                    f"request {index}: {len(request.prompt_ids)} prompt tokens and max_tokens {sampling.max_tokens} "
                    f"are more than the server's --max-model-len of {self._context}; lower max_tokens or leave long "
                    "prompts out"
                )
        fields = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "ignore_eos": True,
            "stop_token_ids": list(stop_token_ids),
        }
        with ThreadPoolExecutor(self._slots) as pool:
            tasks = [
                pool.submit(self._complete, prompt=list(request.prompt_ids), seed=request.seed, **fields)
                for request in requests
            ]
            try:
                for task in as_completed(tasks):
                    task.result()
                    if progress:
                        progress(1)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return [_completion(task.result()) for task in tasks]

    def sleep(self) -> None:
        """Nothing to do: a server's memory is not the trainer's, and it may have other clients."""

    def wake(self) -> None:
        """Nothing to do; see `sleep`."""

    def close(self) -> None:
        """Nothing to do: the server stays, and connections are the threads'."""

    def _complete(self, **fields: Any) -> dict[str, Any]:
        """One choice of one completion request."""
        body = {
            "model": self._model,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            # neutral, whatever the model's generation_config.json says
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            **fields,
        }
        choices = self._client.post("/v1/completions", body).get("choices")
        if not choices:
            raise UserError("the server's answer to a completion request has no choices: is it vLLM 0.32 or later?")
        return choices[0]


class _Client:
    """JSON over HTTP, one connection a thread."""

    def __init__(self, url: str):
        parts = urlsplit(url)
        self.url = url.rstrip("/")
        self._https, self._host = parts.scheme == "https", parts.netloc
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if key := os.environ.get(API_KEY):
            self._headers["Authorization"] = f"Bearer {key}"
        self._local = threading.local()

    def get(self, path: str) -> dict[str, Any]:
        return self._request("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._request("POST", path, json.dumps(body).encode())

    def _request(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        for attempt in range(TRIES):
            if attempt:
                time.sleep(PAUSE_S * 2 ** (attempt - 1))
            try:
                connection = self._connection()
                connection.request(method, self._prefix + path, body, self._headers)
                response = connection.getresponse()
                status, content = response.status, response.read()
            except (OSError, http.client.HTTPException) as error:
                self._local.connection = None
                problem = f"{type(error).__name__}: {error}"
                continue
            if status in (429, 502, 503, 504):
                problem = f"{status} {response.reason}"
                continue
            return self._decode(path, status, content)
        raise UserError(
            f"{self.url}{path}: no answer in {TRIES} tries ({problem}); is the server of engine.server running?"
        )

    def _connection(self) -> http.client.HTTPConnection:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
            connection = self._local.connection = kind(self._host, timeout=TIMEOUT_S)
        return connection

    def _decode(self, path: str, status: int, content: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(content)
        except ValueError:
            answer = None
        if status != 200:
            detail = answer.get("error", answer) if isinstance(answer, dict) else content[:200].decode(errors="replace")
            message = detail.get("message", detail) if isinstance(detail, dict) else detail
            hint = f"; put the server's key into {API_KEY}" if status in (401, 403) else ""
            raise UserError(f"{self.url}{path}: the server answered {status}: {message}{hint}")
        if not isinstance(answer, dict):
            raise UserError(
                f"{self.url}{path}: the answer is no JSON object; is this the URL of an OpenAI-compatible server?"
            )
        return answer


def _find_model(models: Mapping[str, Any], folder: Path, url: str) -> dict[str, Any]:
    """The served model that is `folder`: its path is the same, or it goes by the folder's name or digest."""
    from halfmatch import models as model_folders

    served = models.get("data") or []
    names = {folder.name, str(folder), model_folders.digest(folder)}
    for model in served:
        root = Path(model.get("root") or "")
        if model["id"] in names or (root.is_dir() and root.resolve() == folder.resolve()):
            return model
    raise UserError(
        f"engine.server {url} serves {', '.join(repr(model['id']) for model in served) or 'nothing'}, not {folder}; "
        f"start it with: vllm serve {folder} --logprobs-mode processed_logprobs (on another machine with "
        f"--served-model-name {folder.name})"
    )


def _check_configuration(client: _Client, precision: Precision) -> bool:
    """Compare the dtype with what the server says; whether it said anything (in development mode only it does)."""
    try:
        info = client.get("/server_info?config_format=json")
        held = info["vllm_config"]["model_config"]["dtype"]
    except (UserError, KeyError, TypeError):
        return False
    asked = str(torch_dtype(precision.rollout))
    if held.removeprefix("torch.") != asked.removeprefix("torch."):
        raise UserError(
            f"the server computes in {held}, and the precision asks for rollouts in {precision.rollout}; start it with "
            f"--dtype {asked.removeprefix('torch.')}"
        )
    return True


def _check_logprobs(complete: Callable[..., dict[str, Any]]) -> None:
    """UserError unless log-probs are taken after the temperature: halving it must double all their differences."""

    def differences(temperature: float) -> dict[str, float]:
        choice = complete(prompt=[1], max_tokens=1, temperature=temperature, seed=0, logprobs=5, ignore_eos=True)
        try:
            top = choice["logprobs"]["top_logprobs"][0]
        except (KeyError, TypeError, IndexError):
            raise UserError("the server gives no log-probs; start it without --max-logprobs 0") from None
        highest = max(top.values())
        return {token: value - highest for token, value in top.items()}

    at_one, at_half = differences(1.0), differences(0.5)
    common = [token for token in at_one if token in at_half]
    spread_one = sum(at_one[token] for token in common)
    spread_half = sum(at_half[token] for token in common)
    if not abs(spread_half - 2 * spread_one) < abs(spread_half - spread_one):
        raise UserError(
            "the server's log-probs are those before the temperature, and not of what it samples from; start it with "
            "--logprobs-mode processed_logprobs"
        )


def _completion(choice: Mapping[str, Any]) -> Completion:
    """A choice with its record checked: ids and log-probs, one of each a token."""
    token_ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    if token_ids is None or logprobs is None:
        raise UserError(
            "the server gives no token ids with its log-probs (return_token_ids): is it vLLM 0.32 or later?"
        )
    if len(token_ids) != len(logprobs):
        raise RuntimeError(f"the server gave {len(token_ids)} token ids and {len(logprobs)} log-probs")
    # vLLM writes a log-prob of minus infinity, which no sampled token has, as -9999
    if any(value is None or value <= -9999.0 for value in logprobs):
        raise NonFiniteError("the server sampled a token whose log-prob is not finite")
    if choice["finish_reason"] not in ("stop", "length"):
        raise RuntimeError(f"the server ended a completion with {choice['finish_reason']!r}")
    return Completion(token_ids, logprobs, choice["finish_reason"])
