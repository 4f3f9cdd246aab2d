# Where things are installed, and the version in the library's name: the command looks for the library there.

# Before 1.0 a new minor number is a new ABI.
set(moxie_soversion ${PROJECT_VERSION_MAJOR})
if(PROJECT_VERSION_MAJOR EQUAL 0)
    set(moxie_soversion 0.${PROJECT_VERSION_MINOR})
endif()
if(NOT MOXIE_INSTALL)
    return()
endif()

# A project that has this tree inside says itself where its libraries go, and keeps its own documents.
if(PROJECT_IS_TOP_LEVEL AND NOT DEFINED CMAKE_INSTALL_LIBDIR)
    set(CMAKE_INSTALL_LIBDIR lib CACHE PATH "where libraries go, under the prefix")
endif()
include(GNUInstallDirs)
if(NOT PROJECT_IS_TOP_LEVEL)
    set(CMAKE_INSTALL_DOCDIR ${CMAKE_INSTALL_DATAROOTDIR}/doc/${PROJECT_NAME})
endif()
# From bin/moxie to the library.
cmake_path(RELATIVE_PATH CMAKE_INSTALL_FULL_LIBDIR BASE_DIRECTORY ${CMAKE_INSTALL_FULL_BINDIR} OUTPUT_VARIABLE moxie_bin_to_lib)
