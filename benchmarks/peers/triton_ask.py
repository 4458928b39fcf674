"""Start a tritonserver on 127.0.0.1 with the repositories of a job, ask its models over HTTP and gRPC.

Runs in the environment of triton.txt: nvidia-pytriton carries the server and its Python backend. The job (jobs.py):
{"repositories": [folder], "log": file, "calls": [{"model", "samples": npz, "answers": npz}], "sizes": [batch sizes],
"refused": {"model", "text"}}. The result: {"ready": {model: bool}, "executions": {model: [samples, executions]},
"refusal": what it said, "server": version}; a call's npz holds "<protocol> <batch size> <output>".
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytriton
import tritonclient.grpc
import tritonclient.http
from jobs import read_job, write_result
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

AT_ONCE = 8
"""Requests in flight: what the dynamic batcher gathers."""
SECONDS = 120
"""For the server to become ready."""
PROTOCOLS: Mapping[str, ModuleType] = {"http": tritonclient.http, "grpc": tritonclient.grpc}
DISTRIBUTION = Path(pytriton.__file__).parent / "tritonserver"


@contextmanager
def run_server(repositories: list[str], log: Path) -> Iterator[dict[str, str]]:
    """A tritonserver over the repositories; protocol -> its address. The models need not all be ready."""
    ports = dict(zip(PROTOCOLS, free_ports(len(PROTOCOLS)), strict=True))
    with tempfile.TemporaryDirectory() as folder, log.open("wb") as out:
        backends = shutil.copytree(DISTRIBUTION / "backends", Path(folder) / "backends")
        stub = DISTRIBUTION / "python_backend_stubs" / f"3.{sys.version_info[1]}" / "triton_python_backend_stub"
        shutil.copy(stub, backends / "python")
        command = [str(DISTRIBUTION / "bin" / "tritonserver"), f"--backend-directory={backends}"]
        command += [f"--model-repository={repository}" for repository in repositories]
        command += [f"--{name}-address=127.0.0.1" for name in ports]
        command += [f"--{name}-port={port}" for name, port in ports.items()]
        command += ["--allow-metrics=false", "--exit-on-error=false", "--strict-readiness=false"]
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"  # the stub finds the environment by the first python3
        libraries = str(Path(pytriton.__file__).parent.parent / "nvidia_pytriton.libs")
        environment = {"PATH": path, "TMPDIR": folder, "LD_LIBRARY_PATH": libraries}
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        try:
            yield {name: f"127.0.0.1:{port}" for name, port in ports.items()}
        finally:
            child.send_signal(signal.SIGINT)
            try:
                child.wait(SECONDS)
            except subprocess.TimeoutExpired:  # a stub that does not start keeps it
                child.kill()


def free_ports(n: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports


def wait_until_ready(client: Any) -> None:
    """TimeoutError where the server does not answer in time; it answers when each model is loaded or refused."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            if client.is_server_ready():
                return
        except (InferenceServerException, OSError):
            pass  # it does not listen yet
        time.sleep(0.2)
    raise TimeoutError(f"tritonserver is not ready after {SECONDS} s")


def infer(protocol: str, client: Any, model: str, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One request; output -> array, strings as str."""
    module = PROTOCOLS[protocol]
    inputs = []
    for name, array in columns.items():
        tensor = module.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    result = client.infer(model, inputs)
    response = result.get_response() if protocol == "http" else result.get_response(as_json=True)
    outputs = {output["name"]: result.as_numpy(output["name"]) for output in response["outputs"]}
    return {name: decode(array) if array.dtype == object else array for name, array in outputs.items()}


def decode(strings: np.ndarray) -> np.ndarray:
    return np.array([text.decode("utf-8") for text in strings.ravel()]).reshape(strings.shape)


def ask(protocol: str, address: str, model: str, columns: Mapping[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
    """The answers to all samples, `size` in a request, some requests at once."""
    n = len(next(iter(columns.values())))
    pieces = [{name: array[i : i + size] for name, array in columns.items()} for i in range(0, n, size)]

    def ask_share(first: int) -> dict[int, dict[str, np.ndarray]]:
        with PROTOCOLS[protocol].InferenceServerClient(address) as client:  # one for each thread: they share none
            return {i: infer(protocol, client, model, pieces[i]) for i in range(first, len(pieces), AT_ONCE)}

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = {i: answer for share in pool.map(ask_share, range(AT_ONCE)) for i, answer in share.items()}
    return {name: np.concatenate([found[i][name] for i in range(len(pieces))]) for name in found[0]}


def read_columns(path: str) -> dict[str, np.ndarray]:
    """Samples as the server takes them: strings are objects of bytes."""
    with np.load(path, allow_pickle=False) as saved:
        columns = dict(saved)
    return {
        name: np.array([[text.encode()] for text in array.ravel()], np.object_) if array.dtype.kind == "U" else array
        for name, array in columns.items()
    }


def refusal(client: Any, model: str, text: bytes) -> str:
    try:
        infer("http", client, model, {"text": np.array([[text]], np.object_)})
    except InferenceServerException as error:
        return str(error)
    return ""


def main() -> None:
    job = read_job()
    with run_server(job["repositories"], Path(job["log"])) as addresses, ExitStack() as held:
        client = held.enter_context(tritonclient.http.InferenceServerClient(addresses["http"]))
        wait_until_ready(client)
        models = [one["name"] for one in client.get_model_repository_index()]
        ready = {model: client.is_model_ready(model) for model in models}
        for call in job["calls"]:
            columns, answers = read_columns(call["samples"]), {}
            for protocol, address in addresses.items() if ready[call["model"]] else ():
                for size in job["sizes"]:
                    outputs = ask(protocol, address, call["model"], columns, size)
                    answers |= {f"{protocol} {size} {name}": array for name, array in outputs.items()}
            np.savez(call["answers"], **answers)
        said = refusal(client, job["refused"]["model"], bytes.fromhex(job["refused"]["text"]))
        rows = client.get_inference_statistics()["model_stats"]
        executions = {row["name"]: [row["inference_count"], row["execution_count"]] for row in rows}
        version = client.get_server_metadata()["version"]
        write_result(job, ready=ready, executions=executions, refusal=said, server=version)


if __name__ == "__main__":
    main()
