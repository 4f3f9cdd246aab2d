// Finds libmoxie.so and loads it.

#include "hosts/cli/plugin.h"

#include "hosts/cli/host.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define LIBRARY_NAME "libmoxie.so"
#define LIBRARY_ABI  LIBRARY_NAME "." LIBRARY_SOVERSION // all that a package for users has
#define NO_FILE      113                                // unlike what a library would exit with

// Beside the executable, in ../lib, and where this build has it or installs it. 0 when there is
// none; `folder` is empty when the executable cannot be told.
static int find_near_executable(char *path, size_t capacity, char *folder, size_t folder_capacity)
{
    static const char *const places[] = {".", "../lib", LIBRARY_BUILT, LIBRARY_INSTALLED};
    static const char *const names[] = {LIBRARY_NAME, LIBRARY_ABI};
    ssize_t length = readlink("/proc/self/exe", folder, folder_capacity - 1);
    char *slash = NULL;

    if (length < 0) length = 0;
    folder[length] = '\0';
    slash = strrchr(folder, '/');
    if (slash == NULL) return 0;
    *slash = '\0';
    for (size_t i = 0; i < 2 * sizeof places / sizeof places[0]; i++)
        if ((size_t)snprintf(path, capacity, "%s/%s/%s", folder, places[i / 2], names[i % 2]) <
                capacity &&
            access(path, F_OK) == 0)
            return 1;
    return 0;
}

// Whether the system's loader knows one: LD_LIBRARY_PATH, ld.so.conf.
static int find_installed(char *path, size_t capacity)
{
    return dlopen(LIBRARY_ABI, RTLD_NOW) != NULL &&
           (size_t)snprintf(path, capacity, LIBRARY_ABI) < capacity;
}

// What stands before a message about the library that MOXIE_PLUGIN names; path: of --plugin, or
// NULL.
static const char *named_by(const char *path)
{
    const char *named = getenv("MOXIE_PLUGIN");

    return path == NULL && named != NULL && named[0] != '\0' ? "MOXIE_PLUGIN: " : "";
}

int plugin_find(struct plugin *plugin, const char *path, struct fault *fault)
{
    const char *named = path != NULL ? path : getenv("MOXIE_PLUGIN");
    char folder[PATH_MAX];

    if (named != NULL && named[0] != '\0') {
        // The loader does not look for a name without a slash in the current folder.
        const char *before = strchr(named, '/') == NULL && access(named, F_OK) == 0 ? "./" : "";

        if ((size_t)snprintf(plugin->path, sizeof plugin->path, "%s%s", before, named) <
            sizeof plugin->path)
            return EXIT_OK;
        return fault_set(fault, EXIT_TROUBLE, "the path of the library is longer than %d bytes",
                         PATH_MAX - 1);
    }
    if (find_near_executable(plugin->path, sizeof plugin->path, folder, sizeof folder) ||
        find_installed(plugin->path, sizeof plugin->path))
        return EXIT_OK;
    if (folder[0] == '\0')
        return fault_set(fault, EXIT_TROUBLE,
                         "no " LIBRARY_NAME
                         " where the system looks for libraries, and /proc/self/exe cannot be "
                         "read, beside which it is looked for; mount /proc, or name it with "
                         "--plugin PATH or the environment variable MOXIE_PLUGIN");
    return fault_set(fault, EXIT_TROUBLE,
                     "no " LIBRARY_NAME
                     " in %s, %s/../lib or where the system looks for libraries; "
                     "name it with --plugin PATH or the environment variable MOXIE_PLUGIN",
                     folder, folder);
}

int plugin_check_file(const struct plugin *plugin, const char *path, struct fault *fault)
{
    struct stat seen;

    if (strchr(plugin->path, '/') == NULL) return EXIT_OK;
    if (stat(plugin->path, &seen) != 0 || access(plugin->path, R_OK) != 0)
        return fault_set(fault, EXIT_TROUBLE, "%s%s cannot be loaded: %s", named_by(path),
                         plugin->path, strerror(errno));
    if (!S_ISREG(seen.st_mode))
        return fault_set(fault, EXIT_TROUBLE, "%s%s cannot be loaded: not a regular file",
                         named_by(path), plugin->path);
    return EXIT_OK;
}

// The exit code of a process that asks the loader. What is found may do anything as it is loaded,
// and is not judged here.
static int ask_loader(const char *name, int64_t deadline_s)
{
    int nowhere = open("/dev/null", O_WRONLY);
    char wanted[PATH_MAX + 64];

    (void)dup2(nowhere, STDOUT_FILENO);
    (void)dup2(nowhere, STDERR_FILENO);
    (void)alarm((unsigned)deadline_s);
    if (dlopen(name, RTLD_NOW | RTLD_LOCAL) != NULL) return EXIT_OK;
    // Of a library that it needs, the text begins with that one's name.
    (void)snprintf(wanted, sizeof wanted, "%s: cannot open shared object file", name);
    return strncmp(dlerror(), wanted, strlen(wanted)) == 0 ? NO_FILE : EXIT_OK;
}

int plugin_check_name(const struct plugin *plugin, const char *path, int64_t deadline_s,
                      struct fault *fault)
{
    pid_t asking = 0;
    int status = 0;

    if (strchr(plugin->path, '/') != NULL) return EXIT_OK;
    asking = fork();
    if (asking == 0) _exit(ask_loader(plugin->path, deadline_s));
    while (asking > 0 && waitpid(asking, &status, 0) < 0 && errno == EINTR)
        continue;
    if (asking < 0 || !WIFEXITED(status) || WEXITSTATUS(status) != NO_FILE) return EXIT_OK;
    return fault_set(fault, EXIT_TROUBLE,
                     "%s%s cannot be loaded: no file of that name here, nor where the system looks "
                     "for libraries",
                     named_by(path), plugin->path);
}

int plugin_load(struct plugin *plugin, const char *path, struct fault *fault)
{
    struct library_error error;
    int32_t status = MOXIE_OK;
    int st = EXIT_OK;

    *plugin = (struct plugin){0};
    TRY(plugin_find(plugin, path, fault));
    TRY(plugin_check_file(plugin, path, fault));
    status = moxie_load(plugin->path, HOST_NAME, &plugin->library, library_error(&error));
    if (status != MOXIE_OK) TRY(fault_set(fault, EXIT_TROUBLE, "%s%s", named_by(path), error.text));
    plugin->api = plugin->library.api;
out:
    return st;
}

int plugin_is(const struct plugin *plugin, const char *path)
{
    const char *names[] = {plugin->path, "/proc/self/exe"};
    struct stat file, seen;
    Dl_info loaded;

    // Of a name without a slash only the loader knows where it led.
    if (dladdr(plugin->api, &loaded) != 0) names[0] = loaded.dli_fname;
    if (stat(path, &file) != 0) return 0;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (stat(names[i], &seen) == 0 && seen.st_dev == file.st_dev && seen.st_ino == file.st_ino)
            return 1;
    return 0;
}

void plugin_unload(struct plugin *plugin)
{
    if (plugin->api != NULL) moxie_unload(&plugin->library);
    *plugin = (struct plugin){0};
}

moxie_error *library_error(struct library_error *error)
{
    error->text[0] = '\0';
    error->error = (moxie_error){
        .struct_size = sizeof error->error,
        .rank = -1,
        .text_bytes = sizeof error->text,
        .text = error->text,
    };
    return &error->error;
}
