/* Lists of arrays: what costs Python 0.25 us per sample, and 0.1 here.
 *
 * cffi cannot make an array; this is the only file that uses numpy's C API. It knows nothing of
 * samples, files or shared memory, and releases no lock: the copies are those of shm.c and read.c.
 * It keeps to the stable ABI. engine/arrays.py does the same in Python where this is not built.
 */
#ifndef Py_GIL_DISABLED
#define Py_LIMITED_API 0x030A0000
#endif
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <Python.h>

#include <numpy/arrayobject.h>

static PyObject *integers(PyObject *self, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)self;
    if (arg_count != 2)
        return PyErr_Format(PyExc_TypeError, "integers() takes 2 arguments, not %zd", arg_count);
    PyObject *from = args[0];
    uint64_t count = PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    int is_list = PyList_CheckExact(from);
    if (!is_list && !PyTuple_CheckExact(from))
        Py_RETURN_NONE;
    npy_intp n = is_list ? PyList_Size(from) : PyTuple_Size(from);
    PyObject *found = PyArray_SimpleNew(1, &n, NPY_INT64);
    if (!found)
        return NULL;
    uint64_t *to = PyArray_DATA((PyArrayObject *)found);
    for (npy_intp k = 0; k < n; k++) {
        PyObject *item = is_list ? PyList_GetItem(from, k) : PyTuple_GetItem(from, k);
        int outside = 1;
        int64_t value = 0;
        if (PyLong_CheckExact(item))
            value = PyLong_AsLongLongAndOverflow(item, &outside);
        if (outside || (uint64_t)value >= count) {
            Py_DECREF(found);
            Py_RETURN_NONE;
        }
        to[k] = (uint64_t)value;
    }
    return found;
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

static PyMethodDef functions[] = {
    {"integers", (PyCFunction)(void (*)(void))integers, METH_FASTCALL, NULL},
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
    PyObject *sources = PyLong_FromUnsignedLong(FFS_SOURCES);
    if (module && PyModule_AddObjectRef(module, "SOURCES", sources) < 0)
        Py_CLEAR(module);
    Py_XDECREF(sources);
    return module;
}
