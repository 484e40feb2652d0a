#!/usr/bin/env bash
# Builds an environment for each tool that train.py compares, on a Linux machine with a network and an NVIDIA GPU.
#
#     benchmarks/peers/environments.sh FOLDER [TOOL...]        the tools: ours liger unsloth, all by default
#
# FOLDER/TOOL is the environment, FOLDER/TOOL/bin/python runs train.py. PYTHON (python3.12) builds it, and EXTRA_PIP holds
# further options of pip, such as an index of torch builds. Every tool gets the same torch, FLA and FlashQLA.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:?usage: environments.sh FOLDER [ours] [liger] [unsloth]}
shift
[ $# -gt 0 ] || set -- ours liger unsloth

common=(torch==2.11.0 accelerate==1.15.0 peft==0.21.2 bitsandbytes==0.50.2 flash-linear-attention==0.6.0 fla-core==0.6.0)
# FLA refuses the backward of the gated delta rule on Hopper with Triton < 3.7.1, unless one of these is installed.
kernels=(flash-qla==0.1.3 tilelang==0.1.15)
declare -A packages=(
    [ours]="transformers==5.24.0 trl==1.16.0 datasets==5.2.0"
    [liger]="transformers==5.24.0 trl==1.16.0 datasets==5.2.0 liger-kernel==0.8.5"
    # The newest that Unsloth 2026.10.9 allows: transformers <= 5.17.0, trl <= 1.15.0, datasets < 5.
    [unsloth]="transformers==5.17.0 trl==1.15.0 datasets==4.8.5 unsloth==2026.10.9 unsloth_zoo==2026.10.9"
)

for tool in "$@"; do
    [ -n "${packages[$tool]:-}" ] || { echo "$tool: not one of ${!packages[*]}" >&2 && exit 2; }
    "${PYTHON:-python3.12}" -m venv "$folder/$tool"
    pip=("$folder/$tool/bin/python" -m pip)
    read -ra own <<<"${packages[$tool]}"
    # shellcheck disable=SC2086
    "${pip[@]}" install ${EXTRA_PIP:-} "${common[@]}" "${kernels[@]}" "${own[@]}"
    # `liger` gets this package for the stand-ins of benchmarks/arms.py; it changes no class unless it is asked to.
    [ "$tool" = unsloth ] || "${pip[@]}" install --no-deps -e .
    "${pip[@]}" check || true
done
