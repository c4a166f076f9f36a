// Lets a native test's engine find the fake CUDA driver, in the state of a fresh start.
#pragma once

#include <cstdlib>

#include "fake_cuda.h"

namespace check {

struct FakeDriver {
  FakeDriver() {
    fake_cuda_reset();
    setenv("JAXDISAGG_LIBCUDA", FAKE_CUDA_LIBRARY, 1);
  }
  ~FakeDriver() {
    fake_cuda_reset();
    unsetenv("JAXDISAGG_LIBCUDA");
  }
};

}  // namespace check
