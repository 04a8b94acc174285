"""What one runs beside a training run or after it, each as `python -m tools.NAME`."""

import base  # noqa: F401 (first, for Ctrl-C while the rest is imported)
from base.threads import share_processors

share_processors()  # before torch is imported, which reads the environment then
