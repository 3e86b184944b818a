"""Build steps that pyproject.toml cannot say: the Python check, and configs/ and patches/ inside the wheel."""

import sys

if sys.version_info < (3, 12):
    sys.exit(
        "megatron_elas needs Python 3.12 or newer (megatron-core 0.19 does), but this is Python %d.%d.%d at %s: "
        "run pip with a newer Python, for example 'python3.12 -m pip install .'"
        % (sys.version_info[0], sys.version_info[1], sys.version_info[2], sys.executable)
    )

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

DATA_FOLDERS = ("configs", "patches")


class BuildWithData(build_py):
    """Copies the data folders of the checkout to ``megatron_elas/_data/`` of a wheel.

    An editable install copies nothing: there they are found beside the package, in the checkout.
    """

    def run(self):
        super().run()
        if self.editable_mode:
            return
        for name in DATA_FOLDERS:
            source = Path(__file__).resolve().parent / name
            if source.is_dir():
                target = Path(self.build_lib, "megatron_elas", "_data", name)
                shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": BuildWithData})
