"""The hook may be imported by any script: it brings nothing heavy along."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = {"torch", "deepspeed", "boto3", "botocore", "google", "azure", "kubernetes", "tenacity"}
HEAVY |= {"accelerate", "lightning", "transformers"}


def test_importing_the_hook_imports_no_framework_and_no_cloud_sdk() -> None:
    code = "import ds_ckpt_hook, json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in json.loads(done.stdout)}
    assert "ds_ckpt_hook" in loaded
    assert not loaded & HEAVY
