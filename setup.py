"""Build steps that pyproject.toml cannot say: the Python check, the C libraries, configs/ and patches/ in the wheel."""

import sys

if sys.version_info < (3, 12):
    sys.exit(
        "megatron_elas needs Python 3.12 or newer (megatron-core 0.19 does), but this is Python %d.%d.%d at %s: "
        "run pip with a newer Python, for example 'python3.12 -m pip install .'"
        % (sys.version_info[0], sys.version_info[1], sys.version_info[2], sys.executable)
    )

import shutil
from pathlib import Path

from setuptools import Extension, setup
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


def native_libraries():
    """One library per ``_NAME.c``, see ``megatron_elas/native.py``. Optional: Python code can take its place."""
    root = Path(__file__).resolve().parent
    return [
        Extension(
            ".".join(source.relative_to(root).with_suffix("").parts),
            [str(source.relative_to(root))],
            depends=[
                str(header.relative_to(root))
                for header in sorted([*source.parent.glob("*.h"), *(root / "megatron_elas").glob("*.h")])
            ],
            extra_compile_args=["-O3", "-std=gnu11", "-Wall", "-Wextra", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        )
        for source in sorted((root / "megatron_elas").rglob("_*.c"))
    ]


setup(cmdclass={"build_py": BuildWithData}, ext_modules=native_libraries())
