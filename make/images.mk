# Container images. The Makefile includes this and defines BIN, PIP and setup. IMAGE_BUILD may be buildah's
# `buildah bud --format docker` (only that format has health checks); IMAGE_FLAGS go to it as they are.
.PHONY: image-cpu image-hopper image-rocm images images-lock wheels compose-up compose-down test-images

IMAGE_BUILD ?= docker buildx build --load
IMAGE_FLAGS ?=
# The chart's default; every image has the tag latest as well.
IMAGE_TAG ?= $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
HARDWARE ?= cpu
IMAGES := $(BIN)/python -m serve.images
COMPOSE := docker compose --file docker/compose.yaml --profile $(HARDWARE)

# One wheel for every image.
wheels: setup
	@rm -rf dist build
	@$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist . ./patches/cpu/distribution

image-cpu: wheels ## Build the CPU image (TORCH_INDEX as for setup)
	@$(IMAGE_BUILD) $(IMAGE_FLAGS) $$($(IMAGES) args cpu) $(if $(TORCH_INDEX),--build-arg=TORCH_INDEX=$(TORCH_INDEX)) \
	  --tag dspark-serve:cpu-$(IMAGE_TAG) --tag dspark-serve:cpu-latest \
	  --file docker/cpu/Dockerfile .

image-hopper: wheels ## Build the image for NVIDIA Hopper
	@$(IMAGE_BUILD) $(IMAGE_FLAGS) $$($(IMAGES) args cuda-hopper) \
	  --tag dspark-serve:cuda-hopper-$(IMAGE_TAG) --tag dspark-serve:cuda-hopper-latest \
	  --file docker/cuda-hopper/Dockerfile .

image-rocm: wheels ## Build the image for AMD gfx950
	@$(IMAGE_BUILD) $(IMAGE_FLAGS) $$($(IMAGES) args rocm-gfx950) \
	  --tag dspark-serve:rocm-gfx950-$(IMAGE_TAG) --tag dspark-serve:rocm-gfx950-latest \
	  --file docker/rocm-gfx950/Dockerfile .

images: wheels ## Build every image with docker buildx bake
	@$(IMAGES) bake > dist/images.json
	@TORCH_INDEX="$(TORCH_INDEX)" IMAGE_TAG="$(IMAGE_TAG)" \
	  docker buildx bake --file docker/docker-bake.hcl --file dist/images.json $(IMAGE_FLAGS)

images-lock: setup ## Look up the base images' digests for docker/images.lock
	@$(IMAGES) lock

compose-up: ## Server, Prometheus and Grafana: make compose-up HARDWARE=cpu, cuda-hopper or rocm-gfx950
	@$(COMPOSE) up --detach

compose-down: ## End them; the volumes stay
	@$(COMPOSE) down

test-images: setup-test ## Build and run the images without a registry (needs root, buildah, podman, debootstrap)
	@$(BIN)/python -m pytest -m "images and not slow" tests/docker
