/* Holds MIB of memory, of each page a share of random bytes. Each line on stdin has it read all of it: the milliseconds that takes, and a
 * sum by which an error shows. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

enum { PAGE = 4096 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    size_t size = strtoull(argv[1], NULL, 10) << 20, random = (size_t)(strtod(argv[2], NULL) * PAGE) / 8;
    uint8_t *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || random > PAGE / 8) return 3;
    uint64_t seed = 88172645463325252ull ^ (uint64_t)now();
    for (size_t at = 0; at < size; at += PAGE) {
        uint64_t *page = (uint64_t *)(memory + at);
        page[PAGE / 8 - 1] = at + 1; /* no page is all zeros: those cost nothing in compressed swap */
        for (size_t i = 0; i < random; i++) {
            seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17; /* xorshift64 */
            page[i] = seed;
        }
    }
    char line[64];
    printf("ready\n");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        double begun = now();
        uint64_t sum = 0;
        for (size_t at = 0; at < size; at += PAGE) sum = sum * 31 + *(uint64_t *)(memory + at);
        printf("%.2f %016llx\n", now() - begun, (unsigned long long)sum);
        fflush(stdout);
    }
    return 0;
}
