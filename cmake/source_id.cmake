# cmake -DGIT=git -DSOURCE=DIR -DOUT=FILE -P source_id.cmake: a header that names the commit, at every build. A build directory
# outlives the commit that it was configured at, and ranks compare these names.
set(source_id "unknown")
set(archived "$Format:%H$") # by `git archive`, the commit
if(archived MATCHES "^[0-9a-f]+$")
    string(SUBSTRING ${archived} 0 12 source_id)
elseif(GIT)
    # An unpacked tarball may lie in somebody else's repository, and a container's builder is not who owns the files.
    set(git ${GIT} -c safe.directory=${SOURCE})
    execute_process(COMMAND ${git} ls-files --error-unmatch abi.h
        WORKING_DIRECTORY ${SOURCE} OUTPUT_QUIET ERROR_QUIET RESULT_VARIABLE failed)
    if(failed EQUAL 0)
        execute_process(COMMAND ${git} describe --always --abbrev=12 --exclude=*
            WORKING_DIRECTORY ${SOURCE}
            OUTPUT_VARIABLE described OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
    endif()
    if(failed EQUAL 0)
        # Not describe --dirty, which locks and writes the index while somebody else may work on the tree.
        execute_process(COMMAND ${git} --no-optional-locks status --porcelain --untracked-files=no
            WORKING_DIRECTORY ${SOURCE} OUTPUT_VARIABLE changed ERROR_QUIET)
        set(source_id ${described})
        if(changed)
            string(APPEND source_id "-dirty")
        endif()
    endif()
endif()
file(CONFIGURE OUTPUT ${OUT} CONTENT "#define MOXIE_SOURCE_ID \"${source_id}\"\n") # written if it differs
