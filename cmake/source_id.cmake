# cmake -DGIT=git -DSOURCE=DIR -DOUT=FILE -P source_id.cmake: a header that names the commit, at every build. A build directory
# outlives the commit that it was configured at, and ranks compare these names.
set(source_id "unknown")
if(GIT)
    # An unpacked tarball may lie in somebody else's repository, and a container's builder is not who owns the files.
    set(git ${GIT} -c safe.directory=${SOURCE})
    execute_process(COMMAND ${git} ls-files --error-unmatch abi.h
        WORKING_DIRECTORY ${SOURCE} OUTPUT_QUIET ERROR_QUIET RESULT_VARIABLE failed)
    if(failed EQUAL 0)
        execute_process(COMMAND ${git} describe --always --dirty --abbrev=12 --exclude=*
            WORKING_DIRECTORY ${SOURCE}
            OUTPUT_VARIABLE described OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
    endif()
    if(failed EQUAL 0)
        set(source_id ${described})
    endif()
endif()
file(CONFIGURE OUTPUT ${OUT} CONTENT "#define MOXIE_SOURCE_ID \"${source_id}\"\n") # written if it differs
