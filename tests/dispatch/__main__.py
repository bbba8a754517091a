"""Entry point: python tests/dispatch COMMAND ..., also under torchrun and srun."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
# In place of this folder, whose modules are those of a package
sys.path[0] = str(TESTS)
# evidence.py is the recipes' too; behind everything else, it shadows nothing
sys.path.append(str(TESTS.parent / "spack-repo"))

from dispatch.cli import main  # noqa: E402

sys.exit(main(sys.argv[1:]))
