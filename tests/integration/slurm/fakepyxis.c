/* Stands in for pyxis: takes its options of srun and sbatch and runs the task on the host, where each option that was given is
   seen as FAKEPYXIS_<OPTION>. Declares the few things of slurm/spank.h that it needs: that header is in no package of a cluster.
   Needs -DSLURM_VERSION=(major << 16 | minor << 8 | micro): Slurm loads plugins of its own version only. */
#include <ctype.h>
#include <stdio.h>
#include <string.h>

typedef struct spank_handle *spank_t;
typedef int (*spank_callback)(int value, const char *argument, int remote);
struct spank_option {
    char *name, *arginfo, *usage;
    int has_arg, value;
    spank_callback callback;
};
int spank_option_register(spank_t spank, struct spank_option *option);
int spank_setenv(spank_t spank, const char *name, const char *value, int overwrite);

const char plugin_name[] = "pyxis";
const char plugin_type[] = "spank";
const unsigned int plugin_version = SLURM_VERSION;
const unsigned int spank_plugin_version = 1;

static const struct {
    char *name;
    int has_arg;
} options[] = {
    {"container-image", 1},   {"container-mounts", 1},         {"container-workdir", 1},
    {"container-name", 1},    {"no-container-mount-home", 0},  {"container-mount-home", 0},
    {"container-writable", 0}, {"no-container-entrypoint", 0},
};
enum { COUNT = sizeof options / sizeof *options };
static char given[COUNT][4096];

static int take(int value, const char *argument, int remote) {
    (void)remote;
    snprintf(given[value], sizeof given[value], "%s", argument ? argument : "1");
    return 0;
}

int slurm_spank_init(spank_t spank, int argc, char **argv) {
    (void)argc, (void)argv;
    for (int i = 0; i < COUNT; i++) {
        struct spank_option option = {options[i].name, options[i].has_arg ? "VALUE" : NULL,
                                      "accepted and ignored",  options[i].has_arg, i, take};
        if (spank_option_register(spank, &option)) return -1;
    }
    return 0;
}

int slurm_spank_task_init(spank_t spank, int argc, char **argv) {
    (void)argc, (void)argv;
    for (int i = 0; i < COUNT; i++) {
        char name[64] = "FAKEPYXIS_", *end = name + strlen(name);
        if (!*given[i]) continue;
        for (const char *c = options[i].name; *c; c++) *end++ = *c == '-' ? '_' : (char)toupper((unsigned char)*c);
        spank_setenv(spank, name, given[i], 1);
    }
    return 0;
}
