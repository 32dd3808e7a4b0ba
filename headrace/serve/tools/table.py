"""The table of dialects. A new one is a file beside the others, named here; the first whose marks are there is taken."""

from headrace.serve.tools.deepseek import DEEPSEEK
from headrace.serve.tools.dialect import Dialect, thought
from headrace.serve.tools.gemma import GEMMA
from headrace.serve.tools.glm import GLM
from headrace.serve.tools.harmony import HARMONY
from headrace.serve.tools.hermes import HERMES
from headrace.serve.tools.llama3 import LLAMA3
from headrace.serve.tools.mistral import MISTRAL, MISTRAL_ARGS
from headrace.serve.tools.qwen import QWEN

# Thoughts without tools.
THINK = Dialect("think", (("</think>",),), thought())
DIALECTS = {each.name: each for each in (QWEN, GLM, HERMES, DEEPSEEK, HARMONY, MISTRAL_ARGS, MISTRAL, GEMMA, LLAMA3, THINK)}
