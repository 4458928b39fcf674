"""A bundle behind HTTP: the core of the Open Inference Protocol (KServe v2), with its binary tensors.

```
GET  /v2/health/live                          200 as long as the process answers
GET  /v2/health/ready, /v2/models/NAME/ready  200; 503 from the signal to end on
GET  /v2                                      the server's name, and the extensions that it has
GET  /v2/models/NAME                          the model's inputs and outputs
POST /v2/models/NAME/infer                    {"inputs": [{"name", "shape", "datatype", "data"}]} -> {"outputs": [...]}
POST /v2/models/NAME/generate                 {"text_input", "parameters"} -> {"text_output"}: decoders
```
Samples and answers are those of `runtime.serving.model`: image, text; label, score, logits, embedding. One request runs
at a time. There is no encryption and no identity here: what faces the outside belongs in front of it.

`protocol` knows requests and answers, `app` routes and limits (starlette), `server` connections and the end (uvicorn).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from runtime.errors import MissingDependency
from runtime.serving.limits import MIB, ServingLimits

if TYPE_CHECKING:
    from runtime import Bundle
    from runtime.serving.server import HttpServer

__all__ = ["MIB", "ServingLimits", "require_http_packages", "serve"]


def require_http_packages() -> None:
    """Raise MissingDependency where what serves HTTP is not installed."""
    if missing := [name for name in ("starlette", "uvicorn", "h11") if find_spec(name) is None]:
        raise MissingDependency(" ".join(missing), "serving over HTTP")


def serve(
    bundle: Bundle, host: str = "127.0.0.1", port: int = 8000, limits: ServingLimits | None = None, log: bool = False
) -> HttpServer:
    """Bind a server that answers once `run` is called; port 0: any that is free. `log`: one line for each request.

    UsageError where the port is taken; MissingDependency without the extra `serve`.
    """
    require_http_packages()
    from runtime.serving.server import HttpServer

    return HttpServer(bundle, host, port, limits or ServingLimits(), log)
