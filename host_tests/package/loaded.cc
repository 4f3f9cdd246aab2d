// loaded.c, as a host in C++ has it.

#include <moxie/abi.h>
#include <moxie/loader.h>

#include <cstdio>

int main()
{
    char text[256] = "";
    moxie_error error = {};
    moxie_library library = {};

    error.struct_size = sizeof error;
    error.text_bytes = sizeof text;
    error.text = text;
    if (moxie_load(PLUGIN, "package test", &library, &error) != MOXIE_OK) {
        std::fprintf(stderr, "%s\n", text);
        return 1;
    }
    std::printf("%s\n", library.api->build->version);
    moxie_unload(&library);
    return 0;
}
