"""lm-eval: its tasks on a model of any size (docs/evaluation.md). It needs `pip install headrace[eval]`."""

from headrace.integrations.lm_eval.model import HeadraceLM

__all__ = ["HeadraceLM"]
