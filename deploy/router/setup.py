"""pdserve-router: the packages of pdserve without what only nodes with a model need, gigabytes of torch and NIXL.

It is a distribution of its own because an extra can only add dependencies. Everything comes from the pyproject.toml at
the root of the repository.
"""

import re
import tomllib
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).resolve().parents[2]
ONLY_MODELS = {"torch", "safetensors", "transformers", "nixl-cu12"}

pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
project, tool = pyproject["project"], pyproject["tool"]["setuptools"]
(version,) = re.findall(r'^__version__ = "(.*)"$', (ROOT / "pdserve" / "__init__.py").read_text(), re.MULTILINE)
setup(
    name="pdserve-router",
    version=version,
    description="Routers, tools and simulated nodes of pdserve, without torch and NIXL",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license_expression=project["license"],
    project_urls=project["urls"],
    keywords=project["keywords"],
    classifiers=project["classifiers"],
    python_requires=project["requires-python"],
    install_requires=[each for each in project["dependencies"] if re.split(r"[<>=~!]", each)[0] not in ONLY_MODELS],
    package_dir={"": "../.."},
    packages=find_namespace_packages("../..", include=tool["packages"]["find"]["include"]),
    package_data=tool["package-data"],
    entry_points={"console_scripts": [f"{name} = {target}" for name, target in project["scripts"].items()]},
)
