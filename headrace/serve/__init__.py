"""A server of OpenAI's API: requests become seats of one generation's passes."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.serve.server import Serving as Serving
    from headrace.serve.server import serve as serve

__getattr__ = lazy_face(__name__)
