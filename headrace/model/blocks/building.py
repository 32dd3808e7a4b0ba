"""Models of transformers are built by one thread at a time.

While transformers builds one, torch's default dtype is the model's. That belongs to the whole process, and each builder puts
back what it found, so two threads that build at once would leave it changed.
"""

import threading
from typing import Any

from transformers import AutoModelForCausalLM

BUILDING = threading.RLock()


def model_from(config: Any, **options: Any) -> Any:
    """Return the causal language model that `config` describes; `options` are those of `from_config`."""
    with BUILDING:
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)


def model_read_from(directory: str) -> Any:
    """Return the causal language model of a local directory, with its weights in memory."""
    with BUILDING:
        return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
