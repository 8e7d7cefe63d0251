"""The policies: one YAML file each, the schema, and what loads them. ``delta.policies()`` lists the shipped names.

Imported as ``delta.policies`` only: ``delta/policies`` is a link to this directory.
"""

if __name__ != "delta.policies":
    raise ImportError(f"import this package as delta.policies, not as {__name__}")

import sys
from types import ModuleType

from delta.policies.loader import load, names

__all__ = ["load", "names"]


class CallablePackage(ModuleType):
    """A package that can be called: ``delta.policies()`` lists the shipped names.

    Importing a submodule binds it as an attribute of its package, so ``delta.policies`` is this module from the first
    ``import delta.policies`` on, whatever ``delta.__getattr__`` would say. A function of that name in ``delta`` would
    be replaced at a time that depends on import order; a module that is also the function is the same object always.
    """

    def __call__(self) -> list[str]:
        """Names of the shipped policies, the default one first."""
        return names()


sys.modules[__name__].__class__ = CallablePackage
