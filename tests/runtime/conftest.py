"""Makes the hand-written pipelines importable, here and in the processes that tests start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
