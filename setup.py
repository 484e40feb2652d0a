import re
from pathlib import Path

from setuptools import find_packages, setup


ROOT = Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"$', (ROOT / "src/transformers_packed/__init__.py").read_text(encoding="utf-8"), re.M
)[1]


def description_without_files() -> str:
    """The README for a package index, which has none of the files that the README's pictures and links refer to."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r'<p align="center"><img src="docs/[^>]*></p>\n\n', "", text)
    return re.sub(r"\[([^]]+)\]\((?!https?:)[^)]*\)", r"\1", text)


EXTRAS = {
    # The gated delta rule and the convolution as Triton kernels; on Hopper they need triton >= 3.7.1, torch >= 2.12.1.
    "cuda": ["flash-linear-attention>=0.6.0"],
    # A compiled convolution; optional, its build needs nvcc.
    "causal-conv1d": ["causal-conv1d>=1.7.0"],
    "trl": ["trl>=1.16"],
    "demo": ["matplotlib>=3.9"],
    "docs": ["mkdocstrings-python>=2.0.11", "zensical>=0.0.73"],
}
EXTRAS["dev"] = [
    *EXTRAS["demo"],
    *EXTRAS["docs"],
    "bitsandbytes>=0.50; platform_system == 'Linux'",
    "torchao>=0.18; platform_system == 'Linux'",
    # Writes the quantized checkpoints of the tests.
    "compressed-tensors>=0.20",
    "datasets>=4.7",
    # Importable on Linux, so that the tests meet them as users do; on a CPU nothing of them runs.
    "flash-linear-attention>=0.6.0; platform_system == 'Linux'",
    "triton; platform_system == 'Linux'",
    "hypothesis>=6.100",
    "import-linter>=2.16",
    "jinja2>=3.1",
    "libcst>=1.5",
    "liger-kernel>=0.8.5; platform_system == 'Linux'",
    "mypy==2.4.1",
    "parameterized>=0.9",
    "peft>=0.21",
    "pydantic>=2.4",
    "pytest>=8",
    "pytest-xdist>=3.6.1",
    "ruff==0.17.5",
    "torchdata>=0.11",
    "trl>=1.16",
]

setup(
    name="transformers_packed",
    version=VERSION,
    description="Correct and fast packed (padding-free) training of hybrid linear-attention models in Transformers",
    long_description=description_without_files(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords="transformers packing padding-free training linear-attention gated-delta-rule qwen3-next qwen3.5 qwen3.6 qwen3.8",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    package_dir={"": "src"},
    packages=find_packages("src"),
    package_data={"transformers_packed": ["py.typed"], "transformers_packed.models": ["support_matrix.json"]},
    python_requires=">=3.11",
    install_requires=[
        "accelerate>=1.10.1",
        "numpy>=2.0",
        "psutil>=5.9",
        "torch>=2.11",
        "tqdm>=4.66.3",
        "transformers>=5.16.1,<6",
    ],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["transformers-packed=transformers_packed.cli:main"],
        "axolotl.plugins": ["transformers_packed=transformers_packed.integrations.axolotl:PackedPlugin"],
    },
)
