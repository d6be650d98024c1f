/* SPDX-License-Identifier: Apache-2.0 */
/* A program of MPI that knows nothing of Muster: it calls every function that libmuster-pmpi has, and checks what comes.
 *
 *   program FILE    writes to FILE how many of rank 0's calls have to go which way, in the words of the library's report
 *   program --die   the last rank ends before a collective: the others' call has to return an error
 *   program --hosts one call of the ranks of several hosts, one of those of each host */

#include <mpi.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FUNCTIONS(X)                                                                                              \
  X(Allreduce) X(Bcast) X(Reduce) X(Allgather) X(Allgatherv) X(Gather) X(Gatherv) X(Scatter) X(Scatterv) X(Alltoall) \
  X(Alltoallv) X(Reduce_scatter) X(Reduce_scatter_block) X(Barrier)
#define ID(name) id_##name,
enum { FUNCTIONS(ID) functions };
#define NAME(name) "MPI_" #name,
static const char* const names[functions] = {FUNCTIONS(NAME)};

/* Which way a call has to go in a communicator of several ranks of one host. */
enum Way { muster, mpi, ways };
static long expected[functions][ways];
static int failures;

static int size_of(MPI_Comm comm) {
  int size = 0;
  MPI_Comm_size(comm, &size);
  return size;
}
static int rank_in(MPI_Comm comm) {
  int rank = 0;
  MPI_Comm_rank(comm, &rank);
  return rank;
}
static void expect(int function, enum Way way, MPI_Comm comm) {
  int is_inter = 0;
  MPI_Comm_test_inter(comm, &is_inter);
  expected[function][is_inter || size_of(comm) == 1 ? mpi : way]++;
}
static void check(int holds, const char* what, int line) {
  if (holds) return;
  fprintf(stderr, "FAILED: rank %d, line %d: %s\n", rank_in(MPI_COMM_WORLD), line, what);
  if (++failures > 20) MPI_Abort(MPI_COMM_WORLD, 1);
}
#define CHECK(condition) check(condition, #condition, __LINE__)
#define CALL(way, comm, name, ...)                    \
  do {                                                \
    expect(id_##name, way, comm);                     \
    CHECK(MPI_##name(__VA_ARGS__) == MPI_SUCCESS);    \
  } while (0)

static void* room(size_t bytes) {
  void* const memory = malloc(bytes + 1);
  if (memory == NULL) abort();
  memset(memory, 0x5a, bytes + 1);
  return memory;
}

/* A place for each rank's part: the last rank's first, with gaps. Part r has count + r elements. */
enum { most_ranks = 16, gap = 3 };
struct Places {
  int counts[most_ranks];
  int begins[most_ranks];
  int all;
};
static struct Places places(int ranks, int count) {
  /* MPICH 4.0 forgets where the part of MPI_Allgatherv begins if there is one. */
  struct Places made = {{0}, {0}, ranks > 1 ? gap : 0};
  for (int rank = ranks - 1; rank >= 0; --rank) {
    made.counts[rank] = count + rank;
    made.begins[rank] = made.all;
    made.all += made.counts[rank] + gap;
  }
  return made;
}

/* What a rank gives, by the one that gets it (or 0) and the place. */
#define VALUE(T, from, to, at) ((T)(((from)*7 + (to)*5 + (at)*3) % 19 + 1))

#define TESTS(T, type, name)                                                                                         \
  static void fill_##name(T* to, int count, int from, int by) {                                                      \
    for (int at = 0; at < count; ++at) to[at] = VALUE(T, from, by, at);                                              \
  }                                                                                                                  \
  static int has_##name(const T* in, int count, int from, int by) {                                                  \
    for (int at = 0; at < count; ++at)                                                                               \
      if (in[at] != VALUE(T, from, by, at)) return 0;                                                                \
    return 1;                                                                                                        \
  }                                                                                                                  \
  /* The parts of all ranks, and nothing in the gaps. */                                                             \
  static int has_parts_##name(const T* in, const struct Places* at, int ranks, int by) {                             \
    T untouched;                                                                                                     \
    memset(&untouched, 0x5a, sizeof untouched);                                                                      \
    int next = 0;                                                                                                    \
    for (int rank = ranks - 1; rank >= 0; --rank) {                                                                  \
      for (; next < at->begins[rank]; ++next)                                                                        \
        if (memcmp(&in[next], &untouched, sizeof untouched) != 0) return 0;                                          \
      if (!has_##name(in + next, at->counts[rank], rank, by)) return 0;                                              \
      next += at->counts[rank];                                                                                      \
    }                                                                                                                \
    return 1;                                                                                                        \
  }                                                                                                                  \
  static void moves_##name(MPI_Comm comm, int count, int root) {                                                     \
    const int ranks = size_of(comm), me = rank_in(comm), is_root = me == root;                                       \
    const struct Places at = places(ranks, count);                                                                   \
    const size_t bytes = sizeof(T) * (size_t)(at.all + ranks * (count + ranks));                                              \
    T* in = room(bytes);                                                                                             \
    T* out = room(bytes);                                                                                            \
    fill_##name(in, count, is_root ? root : 99, 0);                                                                  \
    CALL(muster, comm, Bcast, in, count, type, root, comm);                                                          \
    CHECK(has_##name(in, count, root, 0));                                                                           \
    fill_##name(in, count, me, 0);                                                                                   \
    for (int in_place = 0; in_place < 2; ++in_place) {                                                               \
      if (in_place && is_root) fill_##name(out + root * count, count, root, 0);                                      \
      CALL(muster, comm, Gather, in_place && is_root ? MPI_IN_PLACE : in, count, type, out, count, type, root, comm); \
      for (int rank = 0; is_root && rank < ranks; ++rank) CHECK(has_##name(out + rank * count, count, rank, 0));     \
      memset(out, 0x5a, bytes);                                                                                      \
      if (in_place) fill_##name(out + me * count, count, me, 0);                                                     \
      CALL(muster, comm, Allgather, in_place ? MPI_IN_PLACE : in, count, type, out, count, type, comm);              \
      for (int rank = 0; rank < ranks; ++rank) CHECK(has_##name(out + rank * count, count, rank, 0));                \
      memset(out, 0x5a, bytes);                                                                                      \
    }                                                                                                                \
    fill_##name(in, count + me, me, 0);                                                                              \
    for (int in_place = 0; in_place < 2; ++in_place) {                                                               \
      if (in_place && is_root) fill_##name(out + at.begins[me], count + me, me, 0);                                  \
      CALL(muster, comm, Gatherv, in_place && is_root ? MPI_IN_PLACE : in, count + me, type, out, at.counts,         \
           at.begins, type, root, comm);                                                                             \
      if (is_root) CHECK(has_parts_##name(out, &at, ranks, 0));                                                      \
      memset(out, 0x5a, bytes);                                                                                      \
      if (in_place) fill_##name(out + at.begins[me], count + me, me, 0);                                             \
      CALL(muster, comm, Allgatherv, in_place ? MPI_IN_PLACE : in, count + me, type, out, at.counts, at.begins, type, \
           comm);                                                                                                    \
      CHECK(has_parts_##name(out, &at, ranks, 0));                                                                   \
      memset(out, 0x5a, bytes);                                                                                      \
    }                                                                                                                \
    for (int rank = 0; rank < ranks; ++rank) fill_##name(in + rank * count, count, me, rank);                        \
    for (int in_place = 0; in_place < 2; ++in_place) {                                                               \
      CALL(muster, comm, Scatter, in, count, type, in_place && is_root ? MPI_IN_PLACE : out, count, type, root, comm); \
      CHECK((in_place && is_root) || has_##name(out, count, root, me));                                              \
      if (in_place) memcpy(out, in, sizeof(T) * (size_t)(ranks * count));                                            \
      CALL(muster, comm, Alltoall, in_place ? MPI_IN_PLACE : in, count, type, out, count, type, comm);               \
      for (int rank = 0; rank < ranks; ++rank) CHECK(has_##name(out + rank * count, count, rank, me));               \
      memset(out, 0x5a, bytes);                                                                                      \
    }                                                                                                                \
    memset(in, 0x5a, bytes);                                                                                         \
    for (int rank = 0; rank < ranks; ++rank) fill_##name(in + at.begins[rank], count + rank, me, rank);              \
    for (int in_place = 0; in_place < 2; ++in_place) {                                                               \
      CALL(muster, comm, Scatterv, in, at.counts, at.begins, type, in_place && is_root ? MPI_IN_PLACE : out,         \
           count + me, type, root, comm);                                                                            \
      CHECK((in_place && is_root) || has_##name(out, count + me, root, me));                                         \
      memset(out, 0x5a, bytes);                                                                                      \
    }                                                                                                                \
    /* From each as many as this rank's number says, all parts of one length apart. */                               \
    struct Places theirs = at;                                                                                       \
    for (int rank = ranks - 1, next = gap; rank >= 0; --rank, next += count + me + gap) {                            \
      theirs.counts[rank] = count + me;                                                                              \
      theirs.begins[rank] = next;                                                                                    \
    }                                                                                                                \
    T* mine = room(sizeof(T) * (size_t)(gap + ranks * (count + me + gap)));                                          \
    memset(mine, 0x5a, sizeof(T) * (size_t)(gap + ranks * (count + me + gap)));                                      \
    CALL(muster, comm, Alltoallv, in, at.counts, at.begins, type, mine, theirs.counts, theirs.begins, type, comm);   \
    CHECK(has_parts_##name(mine, &theirs, ranks, me));                                                               \
    /* In place, each pair exchanges as many as both their numbers say. */                                           \
    struct Places both = {{0}, {0}, gap};                                                                            \
    for (int rank = ranks - 1; rank >= 0; --rank) {                                                                  \
      both.counts[rank] = count / 2 + (rank + me) / 2;                                                               \
      both.begins[rank] = both.all;                                                                                  \
      both.all += both.counts[rank] + gap;                                                                           \
    }                                                                                                                \
    memset(out, 0x5a, bytes);                                                                                        \
    for (int rank = 0; rank < ranks; ++rank) fill_##name(out + both.begins[rank], both.counts[rank], me, rank);      \
    CALL(muster, comm, Alltoallv, MPI_IN_PLACE, NULL, NULL, MPI_DATATYPE_NULL, out, both.counts, both.begins, type,  \
         comm);                                                                                                      \
    CHECK(has_parts_##name(out, &both, ranks, me));                                                                  \
    free(mine);                                                                                                      \
    free(in);                                                                                                        \
    free(out);                                                                                                       \
  }                                                                                                                  \
  static T reduced_##name(MPI_Op op, int ranks, int by, int at) {                                                    \
    T all = VALUE(T, 0, by, at);                                                                                     \
    for (int rank = 1; rank < ranks; ++rank) {                                                                       \
      const T next = VALUE(T, rank, by, at);                                                                         \
      all = op == MPI_SUM    ? (T)(all + next)                                                                       \
            : op == MPI_PROD ? (T)(all * next)                                                                       \
            : op == MPI_MIN  ? (next < all ? next : all)                                                             \
                             : (next > all ? next : all);                                                            \
    }                                                                                                                \
    return all;                                                                                                      \
  }                                                                                                                  \
  static int has_reduced_##name(const T* in, int count, MPI_Op op, int ranks, int by) {                              \
    for (int at = 0; at < count; ++at)                                                                               \
      if (in[at] != reduced_##name(op, ranks, by, at)) return 0;                                                     \
    return 1;                                                                                                        \
  }                                                                                                                  \
  static void reductions_##name(MPI_Comm comm, int count, int root, MPI_Op op) {                                     \
    const int ranks = size_of(comm), me = rank_in(comm), is_root = me == root;                                       \
    const struct Places at = places(ranks, count);                                                                   \
    const size_t bytes = sizeof(T) * (size_t)(at.all + ranks * (count + ranks));                                              \
    T* in = room(bytes);                                                                                             \
    T* out = room(bytes);                                                                                            \
    for (int in_place = 0; in_place < 2; ++in_place) {                                                               \
      fill_##name(in, count, me, 0);                                                                                 \
      if (in_place) fill_##name(out, count, me, 0);                                                                  \
      CALL(muster, comm, Allreduce, in_place ? MPI_IN_PLACE : in, out, count, type, op, comm);                       \
      CHECK(has_reduced_##name(out, count, op, ranks, 0));                                                           \
      const int keeps = in_place && is_root;                                                                         \
      if (keeps) fill_##name(out, count, me, 0);                                                                     \
      CALL(muster, comm, Reduce, keeps ? MPI_IN_PLACE : in, is_root ? out : NULL, count, type, op, root, comm);      \
      if (is_root) CHECK(has_reduced_##name(out, count, op, ranks, 0));                                              \
      for (int rank = 0; rank < ranks; ++rank) fill_##name(in + rank * count, count, me, rank);                      \
      if (in_place) memcpy(out, in, bytes);                                                                          \
      CALL(muster, comm, Reduce_scatter_block, in_place ? MPI_IN_PLACE : in, out, count, type, op, comm);            \
      CHECK(has_reduced_##name(out, count, op, ranks, me));                                                          \
      T* next = in;                                                                                                  \
      for (int rank = 0; rank < ranks; next += at.counts[rank++]) fill_##name(next, at.counts[rank], me, rank);      \
      if (in_place) memcpy(out, in, bytes);                                                                          \
      CALL(muster, comm, Reduce_scatter, in_place ? MPI_IN_PLACE : in, out, at.counts, type, op, comm);              \
      CHECK(has_reduced_##name(out, at.counts[me], op, ranks, me));                                                  \
    }                                                                                                                \
    free(in);                                                                                                        \
    free(out);                                                                                                       \
  }                                                                                                                  \
  static void all_##name(MPI_Comm comm, int count) {                                                                 \
    const MPI_Op ops[] = {MPI_SUM, MPI_PROD, MPI_MIN, MPI_MAX};                                                      \
    for (int root = 0; root < size_of(comm); ++root) moves_##name(comm, count, root);                                \
    for (int op = 0; op < 4; ++op) reductions_##name(comm, count, op % size_of(comm), ops[op]);                      \
    CALL(muster, comm, Barrier, comm);                                                                               \
  }

TESTS(signed char, MPI_SIGNED_CHAR, schar)
TESTS(uint16_t, MPI_UINT16_T, u16)
TESTS(int, MPI_INT, int)
TESTS(unsigned long, MPI_UNSIGNED_LONG, ulong)
TESTS(long long, MPI_LONG_LONG, llong)
TESTS(float, MPI_FLOAT, float)
TESTS(double, MPI_DOUBLE, double)

static void all_types(MPI_Comm comm, int count) {
  all_schar(comm, count);
  all_u16(comm, count);
  all_int(comm, count);
  all_ulong(comm, count);
  all_llong(comm, count);
  all_float(comm, count);
  all_double(comm, count);
}

static void truths(MPI_Comm comm) {
  const bool in[2] = {rank_in(comm) != 0, rank_in(comm) == 0};
  bool out[2];
  CALL(muster, comm, Allreduce, in, out, 2, MPI_C_BOOL, MPI_LAND, comm);
  CHECK(!out[0] && out[1] == (size_of(comm) == 1));
  CALL(muster, comm, Allreduce, in, out, 2, MPI_C_BOOL, MPI_LOR, comm);
  CHECK(out[0] == (size_of(comm) > 1) && out[1]);
}

/* Takes the right one of two numbers: the ranks' order counts. */
static void right_one(void* in, void* in_out, int* count, MPI_Datatype* type) {
  (void)in, (void)in_out, (void)count, (void)type;
}

/* Operations and types that only MPI has. */
static void others(MPI_Comm comm) {
  const int ranks = size_of(comm), me = rank_in(comm);
  MPI_Op last;
  MPI_Op_create(right_one, 0, &last);
  int in[4] = {me, 1 << me, 1, 0}, out[4 * most_ranks];
  CALL(mpi, comm, Allreduce, in, out, 1, MPI_INT, last, comm);
  CHECK(out[0] == ranks - 1);
  CALL(mpi, comm, Reduce, in, out, 1, MPI_INT, last, 0, comm);
  CHECK(me != 0 || out[0] == ranks - 1);
  MPI_Op_free(&last);
  CALL(mpi, comm, Allreduce, in + 1, out, 1, MPI_INT, MPI_BOR, comm);
  CHECK(out[0] == (1 << ranks) - 1);
  CALL(mpi, comm, Allreduce, in, out, 1, MPI_INT, MPI_LAND, comm);
  CHECK(out[0] == 0);
  CALL(mpi, comm, Allreduce, in, out, 1, MPI_2INT, MPI_MAXLOC, comm);
  CHECK(out[0] == ranks - 1 && out[1] == 1 << (ranks - 1));
  int blocks[most_ranks * 2];
  for (int at = 0; at < ranks; ++at) blocks[at] = me == at;
  CALL(mpi, comm, Reduce_scatter_block, blocks, out, 1, MPI_INT, MPI_BXOR, comm);
  CHECK(out[0] == 1);
  long double wide = me, sum = 0;
  CALL(mpi, comm, Allreduce, &wide, &sum, 1, MPI_LONG_DOUBLE, MPI_SUM, comm);
  CHECK((int)sum == ranks * (ranks - 1) / 2);
  CALL(mpi, comm, Bcast, &wide, 1, MPI_LONG_DOUBLE, ranks - 1, comm);
  CHECK((int)wide == ranks - 1);
}

/* The same elements, which some ranks call by a type of their own: the others cannot know. */
static void derived(MPI_Comm comm) {
  const int ranks = size_of(comm), me = rank_in(comm);
  MPI_Datatype spread, pair;
  MPI_Type_vector(4, 1, 2, MPI_INT, &spread);
  MPI_Type_commit(&spread);
  MPI_Type_contiguous(2, MPI_INT, &pair);
  MPI_Type_commit(&pair);
  for (int root = 0; root < ranks; ++root) {
    int data[8] = {-1, -1, -1, -1, -1, -1, -1, -1};
    const int step = me == root ? 2 : 1;
    for (int at = 0; me == root && at < 4; ++at) data[at * step] = at + root;
    if (me == root)
      CALL(mpi, comm, Bcast, data, 1, spread, root, comm);
    else
      CALL(mpi, comm, Bcast, data, 4, MPI_INT, root, comm);
    for (int at = 0; at < 4; ++at) CHECK(data[at * step] == at + root);
    CHECK(me != root || data[1] == -1);

    const int own[4] = {me, me + 1, me + 2, me + 3};
    int all[4 * most_ranks];
    CALL(mpi, comm, Gather, own, 4, MPI_INT, all, me == root ? 2 : 0, me == root ? pair : MPI_DATATYPE_NULL, root, comm);
    for (int at = 0; me == root && at < 4 * ranks; ++at) CHECK(all[at] == at / 4 + at % 4);
    /* What only the root gives does not count on the others. */
    CALL(muster, comm, Gather, own, 4, MPI_INT, all, me == root ? 4 : -1, me == root ? MPI_INT : MPI_DATATYPE_NULL, root,
         comm);
    for (int at = 0; me == root && at < 4 * ranks; ++at) CHECK(all[at] == at / 4 + at % 4);
    if (me == root)
      CALL(mpi, comm, Scatter, all, 4, MPI_INT, MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, root, comm);
    else
      CALL(mpi, comm, Scatter, NULL, 0, MPI_DATATYPE_NULL, data, 2, pair, root, comm);
    CHECK(me == root || data[0] == me);
  }
  int all[4 * most_ranks];
  const int own[4] = {me, me, me, me};
  if (me % 2 == 0)
    CALL(ranks > 1 ? mpi : muster, comm, Allgather, own, 4, MPI_INT, all, 4, MPI_INT, comm);
  else
    CALL(mpi, comm, Allgather, own, 2, pair, all, 2, pair, comm);
  for (int at = 0; at < 4 * ranks; ++at) CHECK(all[at] == at / 4);
  MPI_Type_free(&spread);
  MPI_Type_free(&pair);
}

/* MPI's own errors, and the communicator goes on. */
static void errors(MPI_Comm comm) {
  int number = 1, sum = 0, code, class;
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  expect(id_Bcast, mpi, comm);
  code = MPI_Bcast(&number, 1, MPI_INT, size_of(comm), comm);
  MPI_Error_class(code, &class);
  CHECK(class == MPI_ERR_ROOT);
  expect(id_Allgather, mpi, comm);
  code = MPI_Allgather(&number, -1, MPI_INT, &sum, -1, MPI_INT, comm);
  MPI_Error_class(code, &class);
  CHECK(class == MPI_ERR_COUNT);
  CALL(muster, comm, Allreduce, &number, &sum, 1, MPI_INT, MPI_SUM, comm);
  CHECK(sum == size_of(comm));
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_ARE_FATAL);
}

/* A message goes on while its sender waits in a collective. */
static void messages(MPI_Comm comm) {
  enum { count = 4 << 20 };
  const int me = rank_in(comm), ranks = size_of(comm);
  char* const data = room(count);
  MPI_Request request;
  if (ranks > 1 && me == 0) {
    MPI_Isend(data, count, MPI_CHAR, ranks - 1, 5, comm, &request);
    CALL(muster, comm, Barrier, comm);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
  } else {
    if (me == ranks - 1 && ranks > 1) {
      usleep(10000);
      memset(data, 0, count);
      MPI_Recv(data, count, MPI_CHAR, 0, 5, comm, MPI_STATUS_IGNORE);
      CHECK(data[0] == 0x5a && data[count - 1] == 0x5a);
    }
    CALL(muster, comm, Barrier, comm);
  }
  free(data);
}

static void communicators(void) {
  const int me = rank_in(MPI_COMM_WORLD), ranks = size_of(MPI_COMM_WORLD);
  MPI_Comm comm, half, between;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  all_int(comm, 7);
  MPI_Comm_free(&comm);
  /* In the reverse order. */
  MPI_Comm_split(MPI_COMM_WORLD, me % 2, -me, &half);
  all_double(half, 1009);
  derived(half);
  if (ranks > 1) {
    int sum = 0, remote = 0;
    const int one = 1, last_odd = ranks / 2 * 2 - 1, last_even = (ranks - 1) / 2 * 2;
    MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, me % 2 == 0 ? last_odd : last_even, 3, &between);
    CALL(mpi, between, Barrier, between);
    CALL(mpi, between, Allreduce, &one, &sum, 1, MPI_INT, MPI_SUM, between);
    MPI_Comm_remote_size(between, &remote);
    CHECK(sum == remote);
    MPI_Comm_free(&between);
  }
  MPI_Comm_free(&half);
}

static void many_communicators(int many) {
  for (int turn = 0; turn < many; ++turn) {
    int sum = 0;
    const int one = 1;
    MPI_Comm comm;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    CALL(muster, comm, Allreduce, &one, &sum, 1, MPI_INT, MPI_SUM, comm);
    CHECK(sum == size_of(comm));
    MPI_Comm_free(&comm);
  }
}

static int die(void) {
  int sum = 0;
  const int one = 1;
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank_in(MPI_COMM_WORLD) == size_of(MPI_COMM_WORLD) - 1) _exit(0);
  if (MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD) == MPI_SUCCESS) _exit(1);
  fprintf(stderr, "rank %d has an error\n", rank_in(MPI_COMM_WORLD));
  _exit(0);
}

static int hosts(void) {
  int sum = 0;
  const int one = 1;
  MPI_Comm here;
  CHECK(MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD) == MPI_SUCCESS);
  CHECK(sum == size_of(MPI_COMM_WORLD));
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &here);
  CHECK(size_of(here) < sum);
  CHECK(MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, here) == MPI_SUCCESS);
  CHECK(sum == size_of(here));
  MPI_Comm_free(&here);
  if (failures == 0) puts("all results are right");
  fflush(stdout);
  /* MPICH's MPI_Finalize over TCP waits for ever for a rank that has ended before it: let all answers come. */
  usleep(500000);
  MPI_Finalize();
  return failures;
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  if (argc != 2) return 2;
  if (strcmp(argv[1], "--die") == 0) return die();
  if (strcmp(argv[1], "--hosts") == 0) return hosts();
  const int counts[] = {0, 1, 1009};
  for (int at = 0; at < 3; ++at) all_types(MPI_COMM_WORLD, counts[at]);
  all_schar(MPI_COMM_WORLD, 100003);
  all_double(MPI_COMM_WORLD, 100003);
  truths(MPI_COMM_WORLD);
  others(MPI_COMM_WORLD);
  derived(MPI_COMM_WORLD);
  errors(MPI_COMM_WORLD);
  messages(MPI_COMM_WORLD);
  communicators();
  many_communicators(10);

  int all = 0;
  CALL(muster, MPI_COMM_WORLD, Allreduce, &failures, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  if (rank_in(MPI_COMM_WORLD) == 0) {
    FILE* const file = fopen(argv[1], "w");
    for (int function = 0; file != NULL && function < functions; ++function)
      fprintf(file, "%s: %ld through Muster, %ld through MPI\n", names[function], expected[function][muster],
              expected[function][mpi]);
    if (file == NULL || fclose(file) != 0) all = 1;
    if (all == 0) puts("all results are right");
  }
  MPI_Finalize();
  return all == 0 ? 0 : 1;
}
