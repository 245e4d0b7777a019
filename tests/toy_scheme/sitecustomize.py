"""Python imports this when it starts with this folder in PYTHONPATH: then there is a scheme
more.
"""

from pathlib import Path

import poc_core.schemes

poc_core.schemes.__path__.append(str(Path(__file__).parent / "schemes"))
