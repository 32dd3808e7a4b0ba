"""lm-eval: its tasks on a model of any size (docs/evaluation.md). It needs the extra `eval`."""

from headrace.integrations.lm_eval.model import HeadraceLM

__all__ = ["HeadraceLM"]
