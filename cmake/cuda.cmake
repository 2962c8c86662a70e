# The CUDA module, and the same kernels as host code for the tests.
#
#   JAXQUANT_CUDA       AUTO  built where nvcc and a driver are found, else left out without a word
#                       ON    built; an error without nvcc
#                       OFF   left out
#   CUDACXX, CMAKE_CUDA_COMPILER   which nvcc; else that on the PATH, in /usr/local/cuda, or in the Python environment
#                       (pip's nvidia-cuda-nvcc with nvidia-cuda-runtime and nvidia-cuda-crt)
#   CMAKE_CUDA_ARCHITECTURES       what to compile for
#   JAXQUANT_EMULATION  ON builds _cuda_emulation

set(JAXQUANT_CUDA_SOURCES)
foreach(operation IN LISTS JAXQUANT_OPERATIONS)
  list(APPEND JAXQUANT_CUDA_SOURCES ${CMAKE_SOURCE_DIR}/ffi/affine/${operation}/cuda.cu)
endforeach()
list(APPEND JAXQUANT_CUDA_SOURCES ${CMAKE_SOURCE_DIR}/ffi/matmul/weight_only/cuda.cu)
set(JAXQUANT_GGML_CUDA_SOURCES)
foreach(operation codec linear quantize)
  list(APPEND JAXQUANT_GGML_CUDA_SOURCES ${CMAKE_SOURCE_DIR}/ffi/ggml/${operation}/cuda.cu)
endforeach()

# A function of its own, for the variables of the search.
function(jaxquant_find_nvcc result)
  if(CMAKE_CUDA_COMPILER)
    set(nvcc "${CMAKE_CUDA_COMPILER}")
  elseif(DEFINED ENV{CUDACXX})
    set(nvcc "$ENV{CUDACXX}")
  else()
    find_program(JAXQUANT_NVCC nvcc PATHS /usr/local/cuda/bin)
    mark_as_advanced(JAXQUANT_NVCC)
    set(nvcc "${JAXQUANT_NVCC}")
    if(NOT nvcc)
      execute_process(COMMAND "${Python_EXECUTABLE}" -c "import nvidia.cu13; print(list(nvidia.cu13.__path__)[0])"
                      OUTPUT_VARIABLE root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
      if(root AND EXISTS "${root}/bin/nvcc")
        set(nvcc "${root}/bin/nvcc")
      endif()
    endif()
  endif()
  set(${result} "${nvcc}" PARENT_SCOPE)
endfunction()

function(jaxquant_find_driver result)
  find_library(JAXQUANT_LIBCUDA NAMES libcuda.so.1)
  find_program(JAXQUANT_NVIDIA_SMI nvidia-smi)
  mark_as_advanced(JAXQUANT_LIBCUDA JAXQUANT_NVIDIA_SMI)
  if(JAXQUANT_LIBCUDA OR JAXQUANT_NVIDIA_SMI OR EXISTS /dev/nvidiactl)
    set(${result} TRUE PARENT_SCOPE)
  else()
    set(${result} FALSE PARENT_SCOPE)
  endif()
endfunction()

set(JAXQUANT_BUILD_CUDA FALSE)
string(TOUPPER "${JAXQUANT_CUDA}" JAXQUANT_CUDA_CHOICE)
if(JAXQUANT_CUDA_CHOICE STREQUAL "AUTO")
  jaxquant_find_driver(driver)
  if(driver)
    jaxquant_find_nvcc(nvcc)
    if(nvcc)
      set(JAXQUANT_BUILD_CUDA TRUE)
    endif()
  endif()
elseif(JAXQUANT_CUDA_CHOICE)  # ON, TRUE, 1
  jaxquant_find_nvcc(nvcc)
  if(NOT nvcc)
    message(FATAL_ERROR "JAXQUANT_CUDA=${JAXQUANT_CUDA}, but there is no nvcc on the PATH, in /usr/local/cuda/bin or in "
                        "the Python environment. Install the CUDA toolkit 13 (or pip's nvidia-cuda-nvcc, "
                        "nvidia-cuda-crt, nvidia-nvvm and nvidia-cuda-runtime), name the compiler with CUDACXX, or set "
                        "JAXQUANT_CUDA=OFF.")
  endif()
  set(JAXQUANT_BUILD_CUDA TRUE)
endif()

if(JAXQUANT_BUILD_CUDA)
  # Machine code for every generation since Turing, and PTX of the newest for those to come.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES "75-real;80-real;86-real;89-real;90-real;100-real;120")
  endif()
  set(CMAKE_CUDA_COMPILER "${nvcc}")
  # pip's toolkit keeps its libraries in lib, where nvcc does not look.
  get_filename_component(nvcc_root "${nvcc}" REALPATH)
  get_filename_component(nvcc_root "${nvcc_root}" DIRECTORY)
  get_filename_component(nvcc_root "${nvcc_root}" DIRECTORY)
  if(EXISTS "${nvcc_root}/lib/libcudart_static.a" AND NOT EXISTS "${nvcc_root}/lib64")
    set(CMAKE_CUDA_FLAGS_INIT "-L${nvcc_root}/lib")
    set(ENV{LIBRARY_PATH} "${nvcc_root}/lib:$ENV{LIBRARY_PATH}")
  endif()
  set(CMAKE_CUDA_STANDARD 17)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)  # imports without a driver, and beside any other runtime
  enable_language(CUDA)

  # Handlers are compiled by the host's compiler; nvcc never reads XLA's headers.
  add_library(jaxquant_cuda_kernels OBJECT ${JAXQUANT_CUDA_SOURCES})
  add_library(jaxquant_ggml_cuda_kernels OBJECT ${JAXQUANT_GGML_CUDA_SOURCES})
  # The CPU's bits: nothing is contracted but by name, quotients are IEEE. Subnormals count as zero as they do in XLA's
  # CPU handlers, but in the block formats as they do in ggml.
  foreach(kernels jaxquant_cuda_kernels jaxquant_ggml_cuda_kernels)
    target_include_directories(${kernels} PRIVATE ${CMAKE_SOURCE_DIR})
    target_compile_options(${kernels} PRIVATE
                           $<$<COMPILE_LANGUAGE:CUDA>:-fmad=false -prec-div=true -prec-sqrt=true>)
  endforeach()
  target_compile_options(jaxquant_cuda_kernels PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-ftz=true>)
  target_compile_options(jaxquant_ggml_cuda_kernels PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-ftz=false>)
  nanobind_add_module(_cuda NB_STATIC NOMINSIZE ffi/cuda_module.cc $<TARGET_OBJECTS:jaxquant_cuda_kernels>
                      $<TARGET_OBJECTS:jaxquant_ggml_cuda_kernels>)
  target_include_directories(_cuda PRIVATE ${CMAKE_SOURCE_DIR})
  target_include_directories(_cuda SYSTEM PRIVATE ${XLA_INCLUDE_DIR} ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  list(JOIN CMAKE_CUDA_ARCHITECTURES " " architectures)
  target_compile_definitions(_cuda PRIVATE "JQ_CUDA_ARCHITECTURES=\"${architectures}\"")
  set_target_properties(_cuda PROPERTIES LINKER_LANGUAGE CUDA CUDA_RUNTIME_LIBRARY Static)
  install(TARGETS _cuda LIBRARY DESTINATION jaxquant/_core)
endif()

if(JAXQUANT_EMULATION)
  find_package(Threads REQUIRED)
  # Through files of another name: in one build a source has one language, and the CUDA module wants nvcc for it.
  set(sources)
  foreach(source IN LISTS JAXQUANT_CUDA_SOURCES JAXQUANT_GGML_CUDA_SOURCES)
    get_filename_component(directory "${source}" DIRECTORY)
    file(RELATIVE_PATH name ${CMAKE_SOURCE_DIR}/ffi "${directory}")
    set(wrapper ${CMAKE_BINARY_DIR}/emulation/${name}.cc)
    file(CONFIGURE OUTPUT ${wrapper} CONTENT "#include \"${source}\"\n" @ONLY)
    list(APPEND sources ${wrapper})
    if(name MATCHES "^ggml/")
      set_source_files_properties(${wrapper} PROPERTIES COMPILE_DEFINITIONS JQ_CUDA_FTZ=false)
    endif()
  endforeach()
  nanobind_add_module(_cuda_emulation NB_STATIC NOMINSIZE ffi/cuda_emulation_module.cc ${sources})
  target_include_directories(_cuda_emulation PRIVATE ${CMAKE_SOURCE_DIR})
  target_include_directories(_cuda_emulation SYSTEM PRIVATE ${XLA_INCLUDE_DIR})
  target_compile_definitions(_cuda_emulation PRIVATE JQ_CUDA_ON_HOST)
  # nvcc's pragmas mean nothing here. -O1: a third of the time to compile, and a launch is mostly threads that wait.
  target_compile_options(_cuda_emulation PRIVATE ${JAXQUANT_NUMERIC_FLAGS} -Wno-unknown-pragmas -O1)
  if(JAXQUANT_SANITIZE)
    # Optimising these kernels with all the checks in them takes minutes, describing their variables many more.
    target_compile_options(_cuda_emulation PRIVATE -O0 -g1)
  endif()
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    target_compile_options(_cuda_emulation PRIVATE -mfma)
  endif()
  target_link_libraries(_cuda_emulation PRIVATE Threads::Threads)
  install(TARGETS _cuda_emulation LIBRARY DESTINATION jaxquant/_core)
endif()
