# One image for all four services: docker build --build-arg BASE_IMAGE=… -t diptych:0.1.0 .
# CPU: the default base. GPU: a base that has Python >= 3.11 and torch >= 2.11 with CUDA, and
# --build-arg TORCH= (empty, to keep the base's torch) --build-arg EXTRAS=cu13.
ARG BASE_IMAGE=python:3.11-slim
FROM ${BASE_IMAGE}
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=embedded
# Bases of Debian and Ubuntu need PIP_BREAK_SYSTEM_PACKAGES: the image is the environment.
ENV PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_BREAK_SYSTEM_PACKAGES=1
RUN if [ -n "${TORCH}" ]; then python3 -m pip install --extra-index-url "${TORCH_INDEX}" "${TORCH}"; fi
WORKDIR /opt/diptych
# Both ends of the three links under src/diptych are copied.
COPY pyproject.toml README.md LICENSE ./
COPY kernels kernels
COPY proto proto
COPY services services
COPY src src
RUN python3 -m pip install ".[${EXTRAS}]"
# No home, no shell: the chart mounts /cache and /tmp, everything else is read-only.
USER 65532:65532
ENV HOME=/cache DIPTYCH_CACHE=/cache/diptych HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton
EXPOSE 8000 9000
ENTRYPOINT ["diptych"]
CMD ["--help"]
