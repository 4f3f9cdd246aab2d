// A host that loads the library, whose path is PLUGIN, at run time.

#include <moxie/abi.h>
#include <moxie/loader.h>

#include <stdio.h>

int main(void)
{
    char text[256] = "";
    moxie_error error = {.struct_size = sizeof error, .text_bytes = sizeof text, .text = text};
    moxie_library library = {0};

    if (moxie_load(PLUGIN, "package test", &library, &error) != MOXIE_OK) {
        fprintf(stderr, "%s\n", text);
        return 1;
    }
    printf("%s\n", library.api->build->version);
    moxie_unload(&library);
    return 0;
}
