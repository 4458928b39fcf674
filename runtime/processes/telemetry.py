"""Nothing of a run leaves the machine: what libraries would send home is turned off before they are loaded.

ONNX Runtime's own wheels report to their maker from version 1.29 on, unless this is set before the first import; a
user's own setting stays. OpenVINO reports each import of itself, through a package that no setting turns off; it forks
for that in a thread, which can stop the process for good where another thread multiplies matrices (numpy's OpenBLAS).
"""

import os
import sys

NO_TELEMETRY = {
    "ORT_DISABLE_TELEMETRY": "1",
    "ORT_TELEMETRY_DISABLED": "1",  # the name in ONNX Runtime 1.29
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}


def turn_off_telemetry() -> None:
    """Set what turns telemetry off; in an ONNX Runtime that is loaded already, all that it can still be told."""
    for name, value in NO_TELEMETRY.items():
        os.environ.setdefault(name, value)
    # Importing it then fails, and OpenVINO does without.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    loaded = sys.modules.get("onnxruntime")
    if loaded is not None and os.environ["ORT_DISABLE_TELEMETRY"] != "0":
        loaded.disable_telemetry_events()


turn_off_telemetry()
