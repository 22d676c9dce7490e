# find_nvcc(OUT LOOKED_AT): the path of nvcc, or "" and the places that were looked at.
#
# Order: -DCMAKE_CUDA_COMPILER, CUDACXX, PATH, CUDA_HOME / CUDA_PATH and the toolkit's usual place,
# then the package-index toolkit (nvidia/cu13) of the Python that runs the build.

function(find_nvcc out looked_at_out)
  set(${looked_at_out} "" PARENT_SCOPE)
  if(CMAKE_CUDA_COMPILER)
    set(${out} "${CMAKE_CUDA_COMPILER}" PARENT_SCOPE)
    return()
  endif()
  if(NOT "$ENV{CUDACXX}" STREQUAL "") # named by the user: a wrong path is theirs to hear about
    set(${out} "$ENV{CUDACXX}" PARENT_SCOPE)
    return()
  endif()

  find_program(PYKESTREL_NVCC nvcc
    HINTS ENV PATH
    PATHS ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda /opt/cuda
    PATH_SUFFIXES bin)
  if(PYKESTREL_NVCC)
    set(${out} "${PYKESTREL_NVCC}" PARENT_SCOPE)
    return()
  endif()

  # pip puts the build's dynamic requirements where CMAKE_PREFIX_PATH does not reach; the
  # interpreter knows.
  if(Python_EXECUTABLE)
    set(python "${Python_EXECUTABLE}")
  else()
    set(python "${PYTHON_EXECUTABLE}")
  endif()
  if(python)
    execute_process(
      COMMAND "${python}" -c
        "import importlib.util as u; s = u.find_spec('nvidia'); print(*(s.submodule_search_locations if s else ()), sep='\\n')"
      OUTPUT_VARIABLE roots OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    string(REPLACE "\n" ";" roots "${roots}")
    foreach(root IN LISTS roots)
      foreach(name nvcc nvcc.exe)
        set(candidate "${root}/cu13/bin/${name}")
        if(EXISTS "${candidate}")
          # The wheels keep their libraries in lib, nvcc.profile links from lib64.
          set(CMAKE_CUDA_FLAGS_INIT "${CMAKE_CUDA_FLAGS_INIT} -L${root}/cu13/lib" PARENT_SCOPE)
          set(${out} "${candidate}" PARENT_SCOPE)
          return()
        endif()
      endforeach()
    endforeach()
  endif()

  set(${out} "" PARENT_SCOPE)
  set(${looked_at_out}
    "CUDACXX, PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda, and Python's nvidia packages"
    PARENT_SCOPE)
endfunction()
