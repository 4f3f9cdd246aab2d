# Whether this build has kernels for a GPU: with_cuda, from what MOXIE_CUDA says and which nvcc there is. no_cuda is the
# reason against them, in words.

set(cuda_wanted 12.5) # the first with cudaGetDriverEntryPointByVersion

moxie_read_choice(MOXIE_CUDA cuda_choice)

# The nvcc to take, and its version, before CMake tries it: an older one, as of Debian 12 and Ubuntu 24.04, would stop the
# configuration in words that do not help.
function(find_nvcc path version)
    set(nvcc ${CMAKE_CUDA_COMPILER})
    if(NOT nvcc AND NOT "$ENV{CUDACXX}" STREQUAL "")
        get_filename_component(nvcc "$ENV{CUDACXX}" PROGRAM)
    elseif(NOT nvcc)
        # What lies in CMake's own places, as /usr/local, nobody has chosen.
        find_program(nvcc nvcc HINTS ENV CUDA_PATH PATH_SUFFIXES bin NO_CMAKE_SYSTEM_PATH NO_CACHE)
    endif()
    set(output)
    if(nvcc)
        execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE output ERROR_QUIET)
    endif()
    string(REGEX MATCH "release ([0-9.]*[0-9])" release "${output}")
    set(${path} ${nvcc} PARENT_SCOPE)
    set(${version} ${CMAKE_MATCH_1} PARENT_SCOPE)
endfunction()

set(no_cuda)
if(cuda_choice STREQUAL "OFF")
    set(no_cuda "MOXIE_CUDA is '${MOXIE_CUDA}'")
elseif(cuda_choice STREQUAL "AUTO" AND CMAKE_CROSSCOMPILING)
    set(no_cuda "this is a cross build, for which nvcc is not asked unless MOXIE_CUDA is ON")
elseif(cuda_choice STREQUAL "AUTO" AND MOXIE_SANITIZE)
    set(no_cuda "MOXIE_SANITIZE is '${MOXIE_SANITIZE}', and MOXIE_CUDA is not ON")
else()
    set(cuda_remedy "CUDA ${cuda_wanted} or newer is wanted; put its nvcc first on PATH, or name it in CUDACXX")
    find_nvcc(nvcc nvcc_version)
    if(NOT nvcc)
        set(no_cuda "there is no nvcc on PATH or in CUDACXX: ${cuda_remedy}")
    elseif(NOT nvcc_version)
        set(no_cuda "${nvcc} --version names no version: ${cuda_remedy}")
    elseif(nvcc_version VERSION_LESS cuda_wanted)
        set(no_cuda "${nvcc} is that of CUDA ${nvcc_version}: ${cuda_remedy}")
    elseif("$ENV{CUDACXX}" STREQUAL "")
        set(ENV{CUDACXX} ${nvcc}) # CMake itself looks beside the C compiler first
    endif()
    if(NOT no_cuda AND cuda_choice STREQUAL "AUTO")
        if(NOT CMAKE_CUDA_COMPILER)
            unset(CMAKE_CUDA_COMPILER CACHE) # that an earlier configuration found none
        endif()
        include(CheckLanguage)
        check_language(CUDA)
        if(NOT CMAKE_CUDA_COMPILER)
            set(no_cuda "${nvcc} of CUDA ${nvcc_version} compiles nothing here: -DMOXIE_CUDA=ON shows why")
        endif()
    endif()
    if(no_cuda AND cuda_choice STREQUAL "ON")
        message(FATAL_ERROR "MOXIE_CUDA is '${MOXIE_CUDA}', but ${no_cuda}; -DMOXIE_CUDA=OFF builds without a GPU")
    endif()
endif()

if(no_cuda)
    set(with_cuda OFF)
    message(STATUS "GPU kernels: no, because ${no_cuda}")
else()
    set(with_cuda ON)
endif()
