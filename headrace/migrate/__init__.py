"""Files of other trainers as `run.yaml`: axolotl, LLaMA-Factory, TRL, and the options of DeepSpeed.

Each tool is one module with its name, `recognises(values)` and `translate(source)`, and one row of `TOOLS`. Invariant: every
key of the file becomes an option, or is named with the reason why it has none. What cannot be trained as asked is refused.
"""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.migrate.migration import TOOLS, Migration, migrate

__getattr__ = lazy_face(__name__)
