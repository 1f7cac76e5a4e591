"""Data parallelism: the same engine several times over, each in a process (and on GPUs) of its own.

A request's completion depends on the request, so which replica serves it does not matter. Each takes one stretch of the
requests, which keeps the samples of a problem, and so its cached prompt, together.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from halfmatch.engines import Completion, Engine, Request
from halfmatch.errors import UserError

if TYPE_CHECKING:
    from halfmatch.config import EngineSettings, Sampling
    from halfmatch.precision import DType, Precision

Start = Callable[[str, Path, "Precision", "EngineSettings"], Engine]


class ReplicatedEngine:
    """`engines.Engine` over `settings.data_parallel` engines that `start` makes."""

    def __init__(self, start: Start, name: str, model: Path, precision: Precision, settings: EngineSettings):
        single = settings.model_copy(update={"data_parallel": 1})
        gpus = _gpu_groups(settings) if settings.device == "cuda" else [None] * settings.data_parallel
        # spawn: a process with threads or a CUDA context cannot be forked safely
        context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        try:
            for group in gpus:
                ours, theirs = context.Pipe()
                arguments = (theirs, group, start, name, model, precision, single)
                process = context.Process(target=_serve, args=arguments, daemon=False)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)
            states = self._gather()
        except BaseException:
            self.close()
            raise
        self.dtype: DType = states[0][0]
        self.description: Mapping[str, Any] = {**states[0][1], "data_parallel": settings.data_parallel}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights of every replica, which read them from one temporary file."""
        from safetensors.torch import save_file

        with tempfile.TemporaryDirectory(prefix="halfmatch-weights-") as folder:
            file = Path(folder) / "model.safetensors"
            save_file({name: weight.detach().contiguous().cpu() for name, weight in weights}, file)
            for connection in self._connections:
                connection.send(("load_weights", file))
            self._gather()

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Sample one completion a request, in the order of the requests; see Engine.generate."""
        replicas = len(self._connections)
        bounds = [len(requests) * replica // replicas for replica in range(replicas + 1)]
        for replica, connection in enumerate(self._connections):
            part = list(requests[bounds[replica] : bounds[replica + 1]])
            connection.send(("generate", (part, sampling, list(stop_token_ids))))
        return [completion for part in self._gather(progress) for completion in part]

    def sleep(self) -> None:
        self._tell("sleep")

    def wake(self) -> None:
        self._tell("wake")

    def _tell(self, message: str) -> None:
        for connection in self._connections:
            connection.send((message, None))
        self._gather()

    def close(self) -> None:
        """End every replica; one that is still at work is stopped."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(timeout=30)
            if process.is_alive():
                process.terminate()
                process.join()

    def _gather(self, progress: Callable[[int], None] | None = None) -> list[Any]:
        """One result of every replica, in their order. An error of one is raised once all have answered."""
        results: dict[int, Any] = {}
        errors: list[BaseException] = []
        waiting: dict[Any, int] = {connection: replica for replica, connection in enumerate(self._connections)}
        try:
            while waiting:
                connection: Any
                for connection in wait(list(waiting)):
                    kind, value = connection.recv()
                    if kind == "progress":
                        if progress:
                            progress(value)
                        continue
                    replica = waiting.pop(connection)
                    if kind == "error":
                        errors.append(value)
                    else:
                        results[replica] = value
        except BaseException as error:
            # Answers that nobody waited for would be taken for those of the next call.
            self.close()
            if isinstance(error, EOFError):
                raise RuntimeError("a replica of the engine ended; its messages are above") from None
            raise
        if errors:
            raise errors[0]
        return [results[replica] for replica in sorted(results)]


def _gpu_groups(settings: EngineSettings) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each replica."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    each, replicas = settings.tensor_parallel, settings.data_parallel
    if len(gpus) < each * replicas:
        raise UserError(
            f"engine.data_parallel {replicas} and engine.tensor_parallel {each} need {each * replicas} GPUs, and this "
            f"job sees {len(gpus)}"
        )
    return [",".join(gpus[each * replica : each * (replica + 1)]) for replica in range(replicas)]


def _serve(
    connection: Connection,
    gpus: str | None,
    start: Start,
    name: str,
    model: Path,
    precision: Precision,
    settings: EngineSettings,
) -> None:
    """The process of a replica: start the engine, then answer until the other end of the connection closes."""
    from safetensors.torch import load_file

    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    # An interrupt at the keyboard reaches every process; the engine that made this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        engine = start(name, model, precision, settings)
    except Exception as error:
        connection.send(("error", error))
        return
    connection.send(("result", (engine.dtype, dict(engine.description))))
    while True:
        try:
            message, argument = connection.recv()
        except EOFError:
            break
        try:
            if message == "load_weights":
                engine.load_weights(load_file(argument).items())
                connection.send(("result", None))
            elif message in ("sleep", "wake"):
                getattr(engine, message)()
                connection.send(("result", None))
            else:
                requests, sampling, stop_token_ids = argument
                completions = engine.generate(
                    requests,
                    sampling,
                    stop_token_ids=stop_token_ids,
                    progress=lambda finished: connection.send(("progress", finished)),
                )
                connection.send(("result", completions))
        except Exception as error:
            connection.send(("error", error))
    engine.close()
