// A host that links the library.

#include <moxie/abi.h>

#include <stdio.h>

int main(void)
{
    const moxie_request request = {.struct_size = sizeof request,
                                   .abi_min = MOXIE_ABI_VERSION,
                                   .abi_max = MOXIE_ABI_VERSION,
                                   .host_build = "package test"};
    char text[256] = "";
    moxie_error error = {.struct_size = sizeof error, .text_bytes = sizeof text, .text = text};
    const moxie_api *api = NULL;

    if (moxie_get_api_v1(&request, &api, &error) != MOXIE_OK) {
        fprintf(stderr, "%s\n", text);
        return 1;
    }
    printf("%s\n", api->build->version);
    return 0;
}
