# What `cmake --install` puts under the prefix: the library, its two headers, the loader's source, the command,
# the Python package, the documents with the example, and the package files for pkg-config and find_package(moxie). Each is
# of a component, so that a distribution can make several packages.

set_target_properties(moxie PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${moxie_soversion})
if(NOT MOXIE_INSTALL)
    return()
endif()

include(CMakePackageConfigHelpers)
target_include_directories(moxie INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)

install(TARGETS moxie EXPORT moxie LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    COMPONENT moxie_runtime NAMELINK_COMPONENT moxie_development)
if(TARGET moxie_cli)
    install(TARGETS moxie_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT moxie_runtime)
endif()
install(FILES abi.h abi/loader.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/moxie COMPONENT moxie_development)
# Its headers beside it: an engine may have a loader.h or an abi.h of its own on its path.
install(FILES abi/loader.c abi/loader.h abi.h DESTINATION ${CMAKE_INSTALL_DATADIR}/moxie COMPONENT moxie_development)
# For PYTHONPATH, or for pip from a copy of it, since pip writes into what it builds.
install(DIRECTORY hosts/python/moxie DESTINATION ${CMAKE_INSTALL_DATADIR}/moxie/python COMPONENT moxie_python FILES_MATCHING
    PATTERN *.py PATTERN __pycache__ EXCLUDE)
# What its README.md links to is installed with the other documents.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS hosts/python/README.md)
cmake_path(RELATIVE_PATH CMAKE_INSTALL_FULL_DOCDIR BASE_DIRECTORY ${CMAKE_INSTALL_FULL_DATADIR}/moxie/python
    OUTPUT_VARIABLE moxie_python_to_doc)
file(READ hosts/python/README.md moxie_python_readme)
string(REPLACE "](../../" "](${moxie_python_to_doc}/" moxie_python_readme "${moxie_python_readme}")
file(WRITE ${PROJECT_BINARY_DIR}/package/python/README.md "${moxie_python_readme}")
install(FILES hosts/python/pyproject.toml ${PROJECT_BINARY_DIR}/package/python/README.md LICENSE
    DESTINATION ${CMAKE_INSTALL_DATADIR}/moxie/python COMPONENT moxie_python)
install(FILES LICENSE README.md CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT moxie_documents)
# Where the links of README.md point, and of these: gates/install.sh follows them.
install(DIRECTORY docs DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT moxie_documents PATTERN CMakeLists.txt EXCLUDE)
install(DIRECTORY hosts/cli/examples DESTINATION ${CMAKE_INSTALL_DOCDIR}/hosts/cli COMPONENT moxie_documents)
foreach(file abi.h bench/README.md bench/results/2026-11-26-h200-peers-bf16.png
    bench/results/2026-11-26-h200-peers-fp8.png host_tests/emulator/README.md hosts/cli/README.md hosts/example/host.c hosts/example/ranks.c
    hosts/python/README.md kernels/README.md)
    cmake_path(GET file PARENT_PATH folder)
    install(FILES ${file} DESTINATION ${CMAKE_INSTALL_DOCDIR}/${folder} COMPONENT moxie_documents)
endforeach()

# The prefix is found from where the .pc file lies, so that an installed tree can be moved.
cmake_path(RELATIVE_PATH CMAKE_INSTALL_PREFIX BASE_DIRECTORY ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig
    OUTPUT_VARIABLE moxie_pc_to_prefix)
foreach(folder LIBDIR INCLUDEDIR DATADIR) # each may be absolute
    cmake_path(RELATIVE_PATH CMAKE_INSTALL_FULL_${folder} BASE_DIRECTORY ${CMAKE_INSTALL_PREFIX}
        OUTPUT_VARIABLE moxie_pc_${folder})
endforeach()
# Not in cmake/, where find_package would look in a build folder for what works only where it is installed.
configure_file(cmake/moxie.pc.in package/moxie.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/package/moxie.pc
    DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT moxie_development)

set(moxie_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/moxie)
install(EXPORT moxie NAMESPACE moxie:: FILE moxieTargets.cmake DESTINATION ${moxie_package_dir} COMPONENT moxie_development)
configure_package_config_file(cmake/moxieConfig.cmake.in package/moxieConfig.cmake
    INSTALL_DESTINATION ${moxie_package_dir}
    PATH_VARS CMAKE_INSTALL_INCLUDEDIR CMAKE_INSTALL_DATADIR CMAKE_INSTALL_LIBDIR)
write_basic_package_version_file(package/moxieConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/package/moxieConfig.cmake ${PROJECT_BINARY_DIR}/package/moxieConfigVersion.cmake
    DESTINATION ${moxie_package_dir} COMPONENT moxie_development)
