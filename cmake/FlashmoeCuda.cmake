# Finds nvcc and enables CUDA. First CUDACXX or -DCMAKE_CUDA_COMPILER, then a toolkit on the PATH or
# in its usual place, then the compiler of PyPI's nvidia-cuda-nvcc package.
#
# find_package(CUDAToolkit) is not called: the PyPI packages hold no unversioned libcudart.so, which
# it insists on, and enable_language(CUDA) alone links the static runtime.

if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES "89-real;90a-real;89-virtual" CACHE STRING "CUDA architectures")
endif()

if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(FLASHMOE_NVCC nvcc
    HINTS "$ENV{CUDA_PATH}/bin" "$ENV{CUDA_HOME}/bin"
    PATHS /usr/local/cuda/bin /opt/cuda/bin)
  if(NOT FLASHMOE_NVCC)
    if(NOT Python_EXECUTABLE)
      find_package(Python COMPONENTS Interpreter QUIET)
    endif()
    if(Python_EXECUTABLE)
      execute_process(
        COMMAND "${Python_EXECUTABLE}" -c
          "import nvidia, pathlib; print(*(str(p) for d in nvidia.__path__ for p in pathlib.Path(d).glob('cu*/bin/nvcc')), sep=';')"
        OUTPUT_VARIABLE flashmoe_pypi_nvcc OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    endif()
    if(flashmoe_pypi_nvcc)
      list(GET flashmoe_pypi_nvcc 0 flashmoe_pypi_nvcc)
      set(FLASHMOE_NVCC "${flashmoe_pypi_nvcc}" CACHE FILEPATH "nvcc" FORCE)
    endif()
  endif()
  if(NOT FLASHMOE_NVCC)
    message(FATAL_ERROR
      "No CUDA compiler was found. Set CUDACXX to an nvcc of CUDA 12.8 or newer, or "
      "`pip install 'nvidia-cuda-nvcc>=13.2' nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime "
      "nvidia-cuda-cccl`, or configure with -DFLASHMOE_CUDA=OFF for the CPU-only library.")
  endif()
  set(CMAKE_CUDA_COMPILER "${FLASHMOE_NVCC}")
endif()

# The families of kernels that use one architecture's own instructions.
set(FLASHMOE_SM90 OFF)
if(CMAKE_CUDA_ARCHITECTURES MATCHES "90a")
  set(FLASHMOE_SM90 ON)
endif()

# Of kernels that take more shared memory than Ada has: where others are built for too, no machine code for it.
# Nor do they use what only sm_90a has: Hopper's machine code, and PTX for what is newer, come of one compilation.
set(FLASHMOE_LARGE_CUDA_ARCHITECTURES "${CMAKE_CUDA_ARCHITECTURES}")
list(REMOVE_ITEM FLASHMOE_LARGE_CUDA_ARCHITECTURES "89-real")
if(NOT FLASHMOE_LARGE_CUDA_ARCHITECTURES)
  set(FLASHMOE_LARGE_CUDA_ARCHITECTURES "${CMAKE_CUDA_ARCHITECTURES}")
endif()
list(TRANSFORM FLASHMOE_LARGE_CUDA_ARCHITECTURES REPLACE "^90a" "90")
if("90-real" IN_LIST FLASHMOE_LARGE_CUDA_ARCHITECTURES)
  list(TRANSFORM FLASHMOE_LARGE_CUDA_ARCHITECTURES REPLACE "^89-virtual$" "90-virtual")
endif()
list(REMOVE_DUPLICATES FLASHMOE_LARGE_CUDA_ARCHITECTURES)

# For people: "89-real 90a-real 89-virtual".
string(REPLACE ";" " " FLASHMOE_CUDA_ARCHITECTURES "${CMAKE_CUDA_ARCHITECTURES}")

enable_language(CUDA)
message(STATUS "CUDA: ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION}, ${CMAKE_CUDA_ARCHITECTURES}")

# Compiles a target's kernels. Registers that spill, local memory and ignored or serialised
# instructions cost half the speed without a word: ptxas says so, and that is an error here. It
# calls the first two warnings and the others information, for which a script reads along.
function(flashmoe_compile_kernels target)
  target_include_directories(${target} SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_compile_definitions(${target} PRIVATE
    FLASHMOE_CUDA_ARCHITECTURES="${FLASHMOE_CUDA_ARCHITECTURES}")
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:
    -Xptxas=--warn-on-spills,--warn-on-local-memory-usage
    $<$<BOOL:${FLASHMOE_WERROR}>:-Werror=all-warnings -Xptxas=--warning-as-error>
    -Xfatbin=-compress-all>)
  set(launcher sh "${PROJECT_SOURCE_DIR}/cmake/strict_nvcc.sh" ${CMAKE_CUDA_COMPILER_LAUNCHER})
  set_target_properties(${target} PROPERTIES CUDA_COMPILER_LAUNCHER "${launcher}")
endfunction()
