# The book's environment, for Binder, Codespaces and `docker build -t attnmem . &&
# docker run -p 8888:8888 attnmem`; `docker run attnmem make book test` runs all of it.
FROM python:3.12-slim
RUN apt-get -qq update && apt-get -qq install --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
ARG NB_USER=jovyan NB_UID=1000
ENV USER=$NB_USER HOME=/home/$NB_USER VENV=/home/$NB_USER/.venv PATH=/home/$NB_USER/.venv/bin:$PATH PIP_NO_CACHE_DIR=1
RUN useradd --create-home --uid $NB_UID $NB_USER
USER $NB_USER
WORKDIR $HOME
# Only a new lock makes this layer again. JupyterLab is the container's alone.
COPY --chown=$NB_UID Makefile requirements.txt constraints.txt ./
COPY --chown=$NB_UID locks/container.txt locks/
RUN make $VENV/.locked && pip install --quiet --only-binary :all: --require-hashes --requirement locks/container.txt
COPY --chown=$NB_UID . .
RUN touch $VENV/.locked && make env
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--no-browser"]
