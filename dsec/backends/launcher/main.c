#include "launcher.h"
#include <string.h>

int main(int argc, char **argv) {
    return argc == 2 && !strcmp(argv[1], "zygote") ? zygote_main() : launch_main(argc, argv);
}
