# choose_archs(NVCC RELEASE): set CMAKE_CUDA_ARCHITECTURES in the caller unless the user did.
#
# release      machine code for Ampere to Blackwell, and PTX of the last for what comes after.
#              9.0 is compiled as 90a, whose instructions (wgmma, TMA) nothing else has; 80 runs on
#              8.x, and 86 and 89 are there for their own tuning.
# development  the architecture of the GPU in this machine, else 90a: a sixth of the time.
#
# The user's word is CMAKE_CUDA_ARCHITECTURES, or CUDAARCHS in the environment.

function(choose_archs nvcc release)
  if(DEFINED CMAKE_CUDA_ARCHITECTURES)
    return()
  endif()
  if(NOT "$ENV{CUDAARCHS}" STREQUAL "")
    set(CMAKE_CUDA_ARCHITECTURES "$ENV{CUDAARCHS}" PARENT_SCOPE)
    unset(ENV{CUDAARCHS}) # or CMake would keep it in the cache, and so for the next build
    return()
  endif()

  if(NOT release)
    set(archs 90a-real)
    find_program(PYKESTREL_NVIDIA_SMI nvidia-smi)
    if(PYKESTREL_NVIDIA_SMI)
      execute_process(
        COMMAND "${PYKESTREL_NVIDIA_SMI}" --query-gpu=compute_cap --format=csv,noheader
        OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
      if(found MATCHES "^([0-9]+)\\.([0-9]+)")
        set(archs "${CMAKE_MATCH_1}${CMAKE_MATCH_2}")
        if(archs EQUAL 90)
          set(archs 90a)
        endif()
        string(APPEND archs "-real")
      endif()
    endif()
    set(CMAKE_CUDA_ARCHITECTURES "${archs}" PARENT_SCOPE)
    return()
  endif()

  # Blackwell (100, 120) needs nvcc 12.8: an older toolkit gets what it knows, PTX on its last.
  execute_process(COMMAND "${nvcc}" --list-gpu-arch OUTPUT_VARIABLE known ERROR_QUIET)
  set(archs "")
  foreach(arch 80 86 89 90a 100 120)
    string(REGEX REPLACE "a$" "" base "${arch}")
    if(known STREQUAL "" OR known MATCHES "compute_${base}[^0-9]")
      list(APPEND archs "${arch}")
    endif()
  endforeach()
  list(POP_BACK archs last)
  list(TRANSFORM archs APPEND "-real")
  if(last MATCHES "a$") # PTX of an "a" target runs on nothing newer
    list(APPEND archs "${last}-real" "90-virtual")
  else()
    list(APPEND archs "${last}") # machine code and PTX
  endif()
  set(CMAKE_CUDA_ARCHITECTURES "${archs}" PARENT_SCOPE)
endfunction()
