/* Lists of arrays: what costs Python 0.25 us per sample, and 0.1 here.
 *
 * cffi cannot make an array; this is the only file that uses numpy's C API. The copies are those of
 * shm.c and cached.c. A read of samples in the page cache is one call, since a sample of 4 KiB is
 * copied and verified in the time of a few Python statements; it calls cached.c, which is linked into
 * the core, by the addresses that `connect` was given. This file keeps to the stable ABI.
 * engine/arrays.py and engine/cached.py do without it where it is not built.
 *
 * It needs no GIL. Its results are its own until they are returned. Of what callers pass, a list may
 * change while it is read, an array's numbers too; tables outlive the call, and cached.c reads them
 * from several threads at a time. The addresses of `connect` are written once, on import.
 */
#include <pyconfig.h> /* Py_GIL_DISABLED */

#ifndef Py_GIL_DISABLED
#define Py_LIMITED_API 0x030A0000
#endif
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <Python.h>

#include <numpy/arrayobject.h>
#include <stdatomic.h>
#include <sys/mman.h>

#include "cached.h"

/* Samples of a call whose numbers need no memory of their own. */
#define FEW 16
/* Bytes of a call from which on other Python threads run meanwhile. Less is read sooner than a
 * thread that gave the interpreter away gets it back. */
#define LARGE (32 << 10)
/* Bytes of a call from which on its arrays get huge pages. */
#define HUGE_FROM (4 << 20)
#define HUGE_PAGE (2 << 20)
/* Lists that do without, after the kernel had no huge pages for one. */
#define WITHOUT 256
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

/* Integers from 0 to `count` - 1 out of a list or tuple of n. Returns whether it has only such. */
static int take_integers(PyObject *from, npy_intp n, uint64_t count, int64_t *to)
{
    for (npy_intp k = 0; k < n; k++) {
        PyObject *item = PySequence_GetItem(from, k); /* owned: another thread may remove it */
        int outside = 1;
        int64_t value = 0;
        if (!item)
            PyErr_Clear(); /* the list has become shorter */
        else if (PyLong_CheckExact(item))
            value = PyLong_AsLongLongAndOverflow(item, &outside);
        Py_XDECREF(item);
        if (outside || (uint64_t)value >= count)
            return 0;
        to[k] = value;
    }
    return 1;
}

static PyObject *integers(PyObject *self, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)self;
    if (arg_count != 2)
        return PyErr_Format(PyExc_TypeError, "integers() takes 2 arguments, not %zd", arg_count);
    PyObject *from = args[0];
    uint64_t count = PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    if (!PyList_CheckExact(from) && !PyTuple_CheckExact(from))
        Py_RETURN_NONE;
    npy_intp n = PySequence_Size(from);
    PyObject *found = PyArray_SimpleNew(1, &n, NPY_INT64);
    if (found && !take_integers(from, n, count, PyArray_DATA((PyArrayObject *)found))) {
        Py_DECREF(found);
        Py_RETURN_NONE;
    }
    return found;
}

/* Give large arrays huge pages. numpy asks for them for an array of 4 MiB and more; of as many bytes in
 * smaller ones, every 4 KiB would have an entry of its own in the TLB. Asking is not enough here: malloc
 * has written between the arrays, so the kernel goes on with small pages. What lies between them
 * belongs to malloc, too. */
static void use_huge_pages(const uint64_t *offsets, npy_intp n, const uint64_t *addresses)
{
    static atomic_int without; /* lists to come that do without */
    uint64_t low = UINT64_MAX, high = 0, total = offsets[n] - offsets[0];
    if (total < HUGE_FROM)
        return;
    for (npy_intp k = 0; k < n; k++) {
        uint64_t end = addresses[k] + (offsets[k + 1] - offsets[k]);
        low = addresses[k] < low ? addresses[k] : low;
        high = end > high ? end : high;
    }
    low = (low + HUGE_PAGE - 1) & ~(uint64_t)(HUGE_PAGE - 1);
    high &= ~(uint64_t)(HUGE_PAGE - 1);
    /* Farther apart, they are in parts of the heap between which anything may be mapped. */
    if (low >= high || high - low > 2 * total)
        return;
    void *begin = (void *)(uintptr_t)low;
    if (madvise(begin, high - low, MADV_HUGEPAGE)) /* this kernel has none */
        return;
    if (without > 0) {
        without--;
        return;
    }
    PyThreadState *state = PyEval_SaveThread(); /* the first time takes as long as clearing them */
    int failed = madvise(begin, high - low, MADV_COLLAPSE);
    PyEval_RestoreThread(state);
    if (failed) /* Linux before 6.1, or its memory is in small pieces */
        without = WITHOUT;
}

/* A list of n arrays of offsets[k + 1] - offsets[k] bytes; addresses[n] gets where their bytes are. */
static PyObject *list_of(const uint64_t *offsets, npy_intp n, uint64_t *addresses)
{
    PyObject *list = PyList_New(n);
    for (npy_intp k = 0; list && k < n; k++) {
        npy_intp size = (npy_intp)(offsets[k + 1] - offsets[k]);
        PyObject *array = PyArray_SimpleNew(1, &size, NPY_UINT8);
        if (!array) {
            Py_DECREF(list);
            return NULL;
        }
        addresses[k] = (uintptr_t)PyArray_DATA((PyArrayObject *)array);
        PyList_SetItem(list, k, array); /* takes the reference */
    }
    if (list)
        use_huge_pages(offsets, n, addresses);
    return list;
}

static PyObject *separate(PyObject *self, PyObject *offsets)
{
    (void)self;
    PyArrayObject *edges = (PyArrayObject *)offsets;
    if (!PyArray_Check(offsets) || PyArray_NDIM(edges) != 1 || PyArray_DIM(edges, 0) < 1 ||
        !PyArray_ISSIGNED(edges) || PyArray_ITEMSIZE(edges) != 8 || !PyArray_ISCARRAY_RO(edges))
        return PyErr_Format(PyExc_TypeError, "separate() takes int64[n + 1], contiguous");
    npy_intp n = PyArray_DIM(edges, 0) - 1;
    PyObject *addresses = PyArray_SimpleNew(1, &n, NPY_UINT64);
    if (!addresses)
        return NULL;
    PyObject *list = list_of(PyArray_DATA(edges), n, PyArray_DATA((PyArrayObject *)addresses));
    PyObject *both = list ? PyTuple_Pack(2, list, addresses) : NULL;
    Py_XDECREF(list);
    Py_DECREF(addresses);
    return both;
}

/* ---- samples in the page cache ------------------------------------------------------------ */
static __typeof__(ffs_local_edges) *local_edges;
static __typeof__(ffs_local_read) *local_read;

/* The addresses of ffs_local_edges and ffs_local_read. */
static PyObject *connect(PyObject *self, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)self;
    if (arg_count != 2)
        return PyErr_Format(PyExc_TypeError, "connect() takes 2 arguments, not %zd", arg_count);
    local_edges = (__typeof__(ffs_local_edges) *)PyLong_AsVoidPtr(args[0]);
    local_read = (__typeof__(ffs_local_read) *)PyLong_AsVoidPtr(args[1]);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

/* The numbers of one call: n of each, of edges one more. */
typedef struct {
    npy_intp n;
    int64_t *indices, *edges, *left;
    uint64_t *addresses;
    int64_t few[4 * FEW + 1];
} numbers;

static int make_room(numbers *of)
{
    size_t n = (size_t)of->n, most = PTRDIFF_MAX / 4 / sizeof(int64_t) - 1;
    of->indices = n <= FEW ? of->few
                : n > most ? NULL
                           : PyMem_Malloc((4 * n + 1) * sizeof(int64_t));
    if (!of->indices) {
        PyErr_NoMemory();
        return 0;
    }
    of->left = of->indices + n;
    of->addresses = (uint64_t *)(of->left + n);
    of->edges = (int64_t *)(of->addresses + n);
    return 1;
}

/* Take a list, a tuple or an array of int64. Returns 1, 0 if it is none of these or has invalid
 * indices, or -1. */
static int take_indices(const ffs_local *t, PyObject *from, numbers *to)
{
    int is_sequence = PyList_CheckExact(from) || PyTuple_CheckExact(from);
    PyArrayObject *array = (PyArrayObject *)from;
    if (is_sequence)
        to->n = PySequence_Size(from);
    else if (PyArray_Check(from) && PyArray_NDIM(array) == 1 && PyArray_ISSIGNED(array) &&
             PyArray_ITEMSIZE(array) == sizeof(int64_t) && PyArray_ISCARRAY_RO(array))
        to->n = PyArray_DIM(array, 0);
    else
        return 0;
    if (!make_room(to))
        return -1;
    if (!is_sequence) /* a copy: other threads may write to the array */
        memcpy(to->indices, PyArray_DATA(array), (size_t)to->n * sizeof(int64_t));
    else if (!take_integers(from, to->n, (uint64_t)t->sample_count, to->indices))
        return 0;
    return !local_edges(t, to->indices, to->n, to->edges);
}

static PyObject *array_of(npy_intp n, int type, const void *from)
{
    PyObject *array = PyArray_SimpleNew(1, &n, type);
    if (array)
        memcpy(PyArray_DATA((PyArrayObject *)array), from, (size_t)n * sizeof(int64_t));
    return array;
}

/* The samples; or, if some are left, also what an engine needs to read those. */
static PyObject *result_of(PyObject *list, const numbers *of, npy_intp left)
{
    if (!left)
        return list;
    PyObject *edges = array_of(of->n + 1, NPY_INT64, of->edges);
    PyObject *addresses = array_of(of->n, NPY_UINT64, of->addresses);
    PyObject *positions = array_of(left, NPY_INT64, of->left);
    PyObject *all = edges && addresses && positions
                      ? PyTuple_Pack(4, list, edges, addresses, positions)
                      : NULL;
    Py_DECREF(list);
    Py_XDECREF(edges);
    Py_XDECREF(addresses);
    Py_XDECREF(positions);
    return all;
}

static int64_t read_left(ffs_local *t, numbers *of, uint8_t *buffer, uint8_t *const *dests)
{
    PyThreadState *state = of->edges[of->n] >= LARGE ? PyEval_SaveThread() : NULL;
    int64_t left = local_read(t, of->indices, of->n, of->edges, buffer, dests, of->left);
    if (state)
        PyEval_RestoreThread(state);
    return left;
}

static PyObject *read_apart(ffs_local *t, numbers *of)
{
    PyObject *list = list_of((uint64_t *)of->edges, of->n, of->addresses);
    return list ? result_of(list, of, read_left(t, of, NULL, (uint8_t *const *)of->addresses))
                : NULL;
}

/* The buffer and the edges; or, if some samples are left, also their positions. */
static PyObject *read_together(ffs_local *t, numbers *of)
{
    npy_intp size = (npy_intp)of->edges[of->n];
    PyObject *buffer = PyArray_SimpleNew(1, &size, NPY_UINT8);
    PyObject *edges = array_of(of->n + 1, NPY_INT64, of->edges);
    PyObject *positions = NULL, *all = NULL;
    if (buffer && edges) {
        int64_t left = read_left(t, of, PyArray_DATA((PyArrayObject *)buffer), NULL);
        if (!left)
            all = PyTuple_Pack(2, buffer, edges);
        else if ((positions = array_of(left, NPY_INT64, of->left)))
            all = PyTuple_Pack(3, buffer, edges, positions);
    }
    Py_XDECREF(buffer);
    Py_XDECREF(edges);
    Py_XDECREF(positions);
    return all;
}

/* most: bytes of the samples; None is returned for more. */
static PyObject *read_with(PyObject *read(ffs_local *t, numbers *of), PyObject *tables,
                           PyObject *indices, int64_t most)
{
    ffs_local *t = PyLong_AsVoidPtr(tables);
    if (!t || !local_read || PyErr_Occurred())
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "no tables: see connect()");
    numbers of; /* not zeroed: half a KiB */
    of.indices = NULL;
    int taken = take_indices(t, indices, &of);
    if (taken > 0 && of.edges[of.n] > most)
        taken = 0;
    PyObject *result = taken > 0 ? read(t, &of) : NULL;
    if (of.indices != of.few)
        PyMem_Free(of.indices);
    if (!taken)
        Py_RETURN_NONE;
    return result;
}

static PyObject *read_cached(PyObject *self, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)self;
    if (arg_count != 2)
        return PyErr_Format(PyExc_TypeError, "read_cached() takes 2 arguments, not %zd", arg_count);
    return read_with(read_apart, args[0], args[1], INT64_MAX);
}

static PyObject *read_joined(PyObject *self, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)self;
    if (arg_count != 3)
        return PyErr_Format(PyExc_TypeError, "read_joined() takes 3 arguments, not %zd", arg_count);
    int64_t most = PyLong_AsLongLong(args[2]);
    return PyErr_Occurred() ? NULL : read_with(read_together, args[0], args[1], most);
}

static PyMethodDef functions[] = {
    {"connect", (PyCFunction)(void (*)(void))connect, METH_FASTCALL, NULL},
    {"integers", (PyCFunction)(void (*)(void))integers, METH_FASTCALL, NULL},
    {"read_cached", (PyCFunction)(void (*)(void))read_cached, METH_FASTCALL, NULL},
    {"read_joined", (PyCFunction)(void (*)(void))read_joined, METH_FASTCALL, NULL},
    {"separate", separate, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_arrays",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__arrays(void)
{
    import_array();
    PyObject *module = PyModule_Create(&definition);
#ifdef Py_GIL_DISABLED
    if (module && PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED) < 0)
        Py_CLEAR(module);
#endif
    PyObject *sources = PyLong_FromUnsignedLong(FFS_SOURCES);
    if (module && PyModule_AddObjectRef(module, "SOURCES", sources) < 0)
        Py_CLEAR(module);
    Py_XDECREF(sources);
    return module;
}
