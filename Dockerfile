# Image of jaxopt_llm for NVIDIA GPUs. The GPUs' driver and the NVIDIA container toolkit belong to the host; CUDA comes
# with the cuda13 extra.
#
#   docker build --tag REGISTRY/jaxopt-llm:latest .
#   docker push REGISTRY/jaxopt-llm:latest
#   docker run --rm --gpus all --shm-size 8g --volume "$PWD/runs:/home/trainer/runs" REGISTRY/jaxopt-llm:latest \
#     train --config quickstart.py
#
# The user is 1000: a folder or volume for runs must be writable for it.
FROM python:3.12-slim

WORKDIR /opt/jaxopt_llm
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE constraints.txt ./
COPY configs configs
COPY jaxopt_llm jaxopt_llm
RUN pip install --no-cache-dir --constraint constraints.txt ".[cuda13]"

RUN useradd --create-home --uid 1000 trainer
USER trainer
WORKDIR /home/trainer
ENTRYPOINT ["jaxopt-llm"]
