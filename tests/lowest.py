"""Tries the lower bounds of pyproject.toml as they stand: `make lowest`.

Makes an environment with the lowest version of everything but torch and triton, which are those of this environment,
and runs the tests that use the libraries in it. Arguments go to pytest.
"""

import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from itertools import chain
from pathlib import Path

FOLDER = Path("build/lowest")
TESTS = (
    "base_cli",
    "base_files",
    "configs",
    "data_*",
    "tracker",
    "checkpoint",
    "report",
    "convert",
    "interchange",
)

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
needed = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
bounds = re.findall(r"^([\w-]+)>=([\w.]+)", "\n".join(needed), re.MULTILINE)
lowest = [f"{name}=={bound}" for name, bound in bounds if name not in ("torch", "triton")]

venv.create(FOLDER, clear=True, with_pip=True)
python = FOLDER / "bin" / "python"
subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *lowest], check=True)
[packages] = FOLDER.glob("lib/python*/site-packages")
(packages / "torch_from_here.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
print(f"{sys.prefix}'s torch with", *lowest, flush=True)
files = [str(path) for name in TESTS for path in sorted(Path("tests").glob(f"test_{name}.py"))]
raise SystemExit(subprocess.run([python, "-m", "pytest", *files, *sys.argv[1:]]).returncode)
