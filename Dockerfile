# The build side without a GPU. Finished work and downloads stay in .cache of the folder that is mounted:
#   docker build -t compress .
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD":/work compress apply recipe.yaml
FROM python:3.12-slim
WORKDIR /source
COPY *.md LICENSE pyproject.toml hatch_build.py constraints.txt ./
COPY compress compress
COPY runtime runtime
COPY recipes recipes
COPY docs docs
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt '.[build]'
WORKDIR /work
ENV HOME=/work
ENTRYPOINT ["compress"]
CMD ["demo"]
