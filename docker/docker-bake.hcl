# Every image in one run: `make images`, which adds the build arguments of docker/images.lock in dist/images.json.
# make gives the package's version.
variable "IMAGE_TAG" {
  default = "latest"
}

variable "TORCH_INDEX" {
  default = ""
}

group "default" {
  targets = ["cpu", "cuda-hopper", "rocm-gfx950"]
}

target "cpu" {
  dockerfile = "docker/cpu/Dockerfile"
  tags       = ["dspark-serve:cpu-${IMAGE_TAG}", "dspark-serve:cpu-latest"]
  args = {
    TORCH_INDEX = TORCH_INDEX
  }
}

target "cuda-hopper" {
  dockerfile = "docker/cuda-hopper/Dockerfile"
  tags       = ["dspark-serve:cuda-hopper-${IMAGE_TAG}", "dspark-serve:cuda-hopper-latest"]
}

target "rocm-gfx950" {
  dockerfile = "docker/rocm-gfx950/Dockerfile"
  tags       = ["dspark-serve:rocm-gfx950-${IMAGE_TAG}", "dspark-serve:rocm-gfx950-latest"]
}
