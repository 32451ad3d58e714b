"""A whole optimized module as a folder, and back: `fast.save(folder)` and `kvcompile.load(folder)`.

What comes back has the plan, the rewritten graph, the weights, and the code that was compiled; not the Python of the
original, which nothing needs any more. Compiled code is code: load what you would run.
"""

from kvcompile.runtime.saved_module.read import load
from kvcompile.runtime.saved_module.write import save

__all__ = ["load", "save"]
