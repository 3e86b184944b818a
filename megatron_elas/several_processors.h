/* FOR_SEVERAL_PROCESSORS before a function: vector code for several kinds of processors, chosen when the library is loaded.
 * For functions that give the same bits on all of them. */
#ifndef ELAS_SEVERAL_PROCESSORS_H
#define ELAS_SEVERAL_PROCESSORS_H

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_SEVERAL_PROCESSORS __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define FOR_SEVERAL_PROCESSORS
#endif

#endif
