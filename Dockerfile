# An image for `tfdist manifest`: TensorFlow, tfdist with its native library compiled, and a script.
#
#   docker build -t registry.example.org/train:1 .
#   docker push registry.example.org/train:1
#
# For GPUs: --build-arg TENSORFLOW="tensorflow[and-cuda]==2.21.*"
FROM python:3.12-slim AS build
ARG TENSORFLOW="tensorflow==2.21.*"
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /venv
ENV PATH=/venv/bin:$PATH PIP_NO_CACHE_DIR=1
RUN pip install "$TENSORFLOW"
COPY . /source
# The library is compiled for the TensorFlow that is installed, and becomes a part of the package.
RUN pip install "/source[metrics]" && tfdist build --into-package

FROM python:3.12-slim
COPY --from=build /venv /venv
# Nothing is written into a home folder, which the pod's user may not have.
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=2
WORKDIR /app
COPY examples/char_lm.py train.py
CMD ["python", "train.py"]
